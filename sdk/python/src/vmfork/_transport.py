"""The thin layer between the protocol core and httpx.

Makes httpx transports for an endpoint and turns httpx's exceptions into ours. ``transport=`` of the
clients is the seam: anything that httpx takes as one will do (``httpx.MockTransport`` in tests).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from ._config import Endpoint, Timeout
from ._errors import ConnectionFailed, ProtocolError, TimeoutExceeded
from ._protocol import Call

#: Callers fan out over many clones with one client; beyond this, calls wait for a connection.
CONNECTIONS_MAX = 256

_LIMITS = httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=32)


def sync_transport(endpoint: Endpoint) -> httpx.BaseTransport:
    """A transport to ``endpoint`` for :class:`httpx.Client`."""
    return httpx.HTTPTransport(uds=endpoint.socket, limits=_LIMITS, trust_env=False)


def async_transport(endpoint: Endpoint) -> httpx.AsyncBaseTransport:
    """A transport to ``endpoint`` for :class:`httpx.AsyncClient`."""
    return httpx.AsyncHTTPTransport(uds=endpoint.socket, limits=_LIMITS, trust_env=False)


def client_options(endpoint: Endpoint) -> dict[str, Any]:
    """What both kinds of httpx client are made with, the transport apart."""
    headers = {"user-agent": "vmfork-python/0.1.0", "accept": "application/json"}
    if endpoint.token is not None:
        headers["authorization"] = f"Bearer {endpoint.token}"
    # The daemon is never behind the environment's proxy.
    return {
        "base_url": endpoint.base_url,
        "headers": headers,
        "trust_env": False,
        "follow_redirects": False,
    }


def request_options(
    call: Call[Any], timeout: Timeout, content: object = None
) -> dict[str, Any]:
    """The keyword arguments of a request by httpx; ``content`` is a body that is not JSON."""
    body = call.body()
    options: dict[str, Any] = {
        "params": dict(call.query),
        "timeout": httpx.Timeout(
            connect=timeout.connect_s,
            read=call.answer_within_s,
            write=timeout.idle_s,
            pool=call.answer_within_s,
        ),
    }
    if body is not None:
        options["content"] = body
        options["headers"] = {"content-type": "application/json"}
    elif content is not None:
        options["content"] = content
        options["headers"] = {"content-type": "application/octet-stream"}
    return options


def private_file(path: Path) -> BinaryIO:
    """A new file for a download, which no other user may read until it is complete."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


@contextlib.contextmanager
def translated(call: Call[Any], endpoint: Endpoint, timeout: Timeout) -> Iterator[None]:
    """Turn httpx's exceptions inside the block into ours."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise ConnectionFailed(
            f"{call.what}: {endpoint} did not take the connection within {timeout.connect_s:g} s"
        ) from error
    except httpx.ConnectError as error:
        raise ConnectionFailed(
            f"{call.what}: no daemon answers at {endpoint}: {error} "
            "(hint: `vmfork daemon start` starts one)"
        ) from error
    except httpx.TimeoutException as error:
        raise TimeoutExceeded(
            "timeout",
            call.what,
            cause=f"{endpoint} sent nothing for {call.answer_within_s:g} s",
            remedy="give it longer by `timeout=`, or look into the daemon's log",
            vm=call.vm,
        ) from error
    except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
        raise ConnectionFailed(
            f"{call.what}: the connection to {endpoint} broke: {error or type(error).__name__}"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ProtocolError(f"{call.what}: {error}") from error
