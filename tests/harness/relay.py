"""`relay.py PORT DELAY_S OWN_PORT`: see `s3.relay`. Prints the port that it listens on; ends with its standard input."""

from __future__ import annotations

import asyncio
import os
import sys
import threading


async def relay(to: int, delay_s: float, port: int) -> None:
    async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, delay_s: float) -> None:
        """Until either end closes. What is under way is bounded by what the reader takes within the delay."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(4096)

        async def send() -> None:
            while True:
                due, piece = await queue.get()
                if (wait := due - loop.time()) > 0:
                    await asyncio.sleep(wait)
                if not piece:
                    return
                sink.write(piece)
                await sink.drain()

        sending = loop.create_task(send())
        try:
            while piece := await source.read(1 << 18):
                await queue.put((loop.time() + delay_s, piece))
            await queue.put((loop.time() + delay_s, b""))
            await sending
        except ConnectionError:
            pass
        finally:
            sending.cancel()
            sink.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", to)
        except ConnectionError:
            writer.close()
            return
        await asyncio.gather(carry(reader, forth, 0.0), carry(back, writer, delay_s))

    listener = await asyncio.start_server(accept, "127.0.0.1", port)
    print(listener.sockets[0].getsockname()[1], flush=True)
    async with listener:
        await listener.serve_forever()


def end_with_parent() -> None:
    """The pipe's other end is closed when the process that started this has ended."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    asyncio.run(relay(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
