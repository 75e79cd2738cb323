"""An object store with what `s3://` disks need: HEAD and GET of ranges, with `If-Match`."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import threading
from collections.abc import Iterator

BUCKET = "disks"


class Objects:
    """Objects by key. What is asked for is counted."""

    def __init__(self) -> None:
        self._content: dict[str, bytes] = {}
        self._etags: dict[str, str] = {}
        self._lock = threading.Lock()
        #: Bytes that were sent.
        self.sent_bytes = 0
        #: Bytes that were sent before.
        self.again_bytes = 0
        #: Path and offset of each range, as they were sent.
        self._sent: list[tuple[str, int]] = []
        #: Whether requests are answered; else they are refused.
        self.answers = True
        #: Whether bytes are given; else only what an object is.
        self.gives = True
        #: Whether `If-Match` is heeded.
        self.heeds_match = True
        self.port = 0

    def put(self, key: str, content: bytes) -> str:
        """→ its location."""
        self._content[key] = content
        self._etags[key] = f'"{hashlib.md5(content).hexdigest()}"'
        return f"s3://{BUCKET}/{key}"

    def again(self) -> list[tuple[int, str, int]]:
        """What was sent before: at which number, path and offset."""
        sent = self._sent
        return [(at, *one) for at, one in enumerate(sent) if one in sent[:at]]

    def environment(self) -> dict[str, str]:
        """What a daemon has to know."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "hush",
        }

    def answer(self, path: str, headers: dict[str, str], has_body: bool) -> tuple[int, dict[str, str], bytes]:
        if not self.answers or (has_body and not self.gives):
            return 403, {}, b"<Error><Code>AccessDenied</Code></Error>"
        key = path.removeprefix(f"/{BUCKET}/")
        content = self._content.get(key)
        if content is None:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        etag = self._etags[key]
        if self.heeds_match and headers.get("if-match", etag) != etag:
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
        told = {"ETag": etag, "Last-Modified": "Fri, 27 Nov 2026 00:00:00 GMT"}
        if "range" not in headers:
            return 200, told, content
        first, last = map(int, headers["range"].removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        # One byte tells whether it can be read.
        if has_body and last > first:
            with self._lock:
                self.sent_bytes += len(part)
                self.again_bytes += len(part) if (path, first) in self._sent else 0
                self._sent.append((path, first))
        return 206, {**told, "Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(content)}"}, part


@contextlib.contextmanager
def server() -> Iterator[Objects]:
    """One for the block."""
    objects = Objects()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # the name is http.server's
            headers = {name.lower(): value for name, value in self.headers.items()}
            has_body = self.command == "GET"
            status, told, body = objects.answer(self.path, headers, has_body)
            self.send_response(status)
            for name, value in told.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if has_body:
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    objects.port = made.server_address[1]
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield objects
    finally:
        made.shutdown()
        thread.join()
        made.server_close()
