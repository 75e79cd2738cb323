"""Hosts that pull one guest image at the same moment, over links of 100 Mbit/s.

From one host that seeds it, and from each other, as in vmTorrent's evaluation. Beside it, in the
same run: the same bytes by HTTP from that host alone.
"""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from .. import cluster as c
from .. import world as w

TITLE = "One image for many hosts"

RATE = "100mbit"
#: Hosts that pull.
COUNTS = (1, 2, 4, 8)
COUNTS_QUICK = (1, 3)
PORT = 8080
#: Gets files over one connection.
FETCH = """
import http.client, sys, urllib.parse
to = http.client.HTTPConnection(urllib.parse.urlsplit(sys.argv[1]).netloc, timeout=600)
for path in sys.stdin.read().split():
    to.request("GET", "/" + path)
    answer = to.getresponse()
    assert answer.status == 200 and answer.read()
"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def _http(made: c.Cluster, folder: Path) -> Iterator[str]:
    """A folder by HTTP, on the first host."""
    handler = functools.partial(_Quiet, directory=str(folder))
    server = c.inside(made.net, 0, lambda: http.server.ThreadingHTTPServer(("0.0.0.0", PORT), handler))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://{made.net.addresses[0]}:{PORT}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _together(made: c.Cluster, act: Callable[[int], None]) -> float:
    """All hosts but the first do something at the same moment. → ms until the last one has."""
    others = range(1, len(made.daemons))
    begin = w.now_ms()
    with ThreadPoolExecutor(len(others)) as pool:
        list(pool.map(act, others))
    return w.now_ms() - begin


def run(world: w.World) -> None:
    series = world.figures.series
    for count in COUNTS_QUICK if world.quick else COUNTS:
        with c.cluster(world, count + 1, pool=0, rate=RATE) as made:
            for client in made.clients[1:]:
                client.remove_image(world.image)
            made.clients[0].seed_image(world.image)
            store = made.daemons[0].state / "snapshots" / "chunks"
            chunks = sorted(store.glob("*/*"))
            stored_bytes = sum(path.stat().st_size for path in chunks)
            labels = {"hosts": count, "links": RATE}
            series("image_stored_bytes", **labels).add(stored_bytes)

            def pull(number: int, made: c.Cluster = made) -> None:
                made.clients[number].pull_image(world.image)
                w.eventually(lambda: made.clients[number].images()[0].remote is None, 600, "all of it is here", every_s=0.05)

            for _ in world.rounds(f"{count} hosts pull an image", share=0.1):
                before = made.sent_bytes()
                series("image_pull_ms", way="from each other", **labels).add(_together(made, pull))
                sent = (made.sent_bytes() - before) / stored_bytes
                series("image_sent_ratio", way="from each other", **labels).add(sent)
                for client in made.clients[1:]:
                    client.remove_image(world.image)
                with _http(made, store) as url:

                    def fetch(number: int, made: c.Cluster = made, url: str = url, chunks: list[Path] = chunks) -> None:
                        paths = [f"{path.parent.name}/{path.name}" for path in chunks]
                        argv = [*made.net.prefix(number), sys.executable, "-c", FETCH, url]
                        subprocess.run(argv, input="\n".join(paths), text=True, timeout=600, check=True)

                    before = made.sent_bytes()
                    series("image_pull_ms", way="from one by HTTP", **labels).add(_together(made, fetch))
                    sent = (made.sent_bytes() - before) / stored_bytes
                    series("image_sent_ratio", way="from one by HTTP", **labels).add(sent)
