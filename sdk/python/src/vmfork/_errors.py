"""What can go wrong, as a tree.

::

    VmforkError
    ├── ConnectionFailed       no daemon answers there, or it went away in the middle
    ├── ProtocolError          something answered, but not in vmfork's words
    ├── ExecFailed             check=True, and the program did not end with 0 (.result)
    └── ApiError               the daemon refused or failed (.code .message .cause .remedy .vm)
        ├── BadRequest         a value is malformed or out of range
        ├── Unauthorized       the token is missing or wrong
        ├── NotFound           no VM, image, snapshot or file of that name
        ├── Conflict           the name is taken, or the VM is in the wrong state for this
        ├── NoCapacity         it does not fit into memory, or into a limit
        ├── GuestError         the guest's agent did not answer, or refused
        ├── QemuError          QEMU or its shim failed
        ├── HostError          the host lacks something: userfaultfd, QEMU, disk space
        ├── TimeoutExceeded    it took longer than its bound (the daemon's, or the client's)
        ├── PageLost           a page of memory could be had from no source
        └── InternalError      a bug of vmfork

A code that this version does not know comes as a plain ``ApiError`` with that ``code``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from ._models import ErrorBody, ExecResult

__all__ = [
    "ApiError",
    "BadRequest",
    "Conflict",
    "ConnectionFailed",
    "ExecFailed",
    "GuestError",
    "HostError",
    "InternalError",
    "NoCapacity",
    "NotFound",
    "PageLost",
    "ProtocolError",
    "QemuError",
    "TimeoutExceeded",
    "Unauthorized",
    "VmforkError",
]


class VmforkError(Exception):
    """The root of everything that this package raises on purpose."""


class ConnectionFailed(VmforkError):
    """No daemon answers at the address, or the connection broke in the middle."""


class ProtocolError(VmforkError):
    """An answer came that is not one of vmfork's."""


class ApiError(VmforkError):
    """The daemon's answer is an error.

    ``code`` is the stable word to switch on. ``message`` names what failed, ``cause`` why,
    ``remedy`` what to do about it. ``vm`` is the name or id of the VM it is about, if any.
    """

    _by_code: ClassVar[dict[str, type[ApiError]]] = {}

    def __init_subclass__(cls, *, code: str) -> None:
        super().__init_subclass__()
        ApiError._by_code[code] = cls

    def __init__(
        self,
        code: str,
        message: str,
        *,
        cause: str | None = None,
        remedy: str | None = None,
        vm: str | None = None,
    ) -> None:
        text = message if cause is None else f"{message}: {cause}"
        super().__init__(text if remedy is None else f"{text} (hint: {remedy})")
        self.code = code
        self.message = message
        self.cause = cause
        self.remedy = remedy
        self.vm = vm

    def __reduce__(self) -> tuple[object, ...]:
        # The default calls cls(*args), and args is the joined text.
        return (_rebuild, (self.code, self.message, self.cause, self.remedy, self.vm))

    @staticmethod
    def from_body(body: ErrorBody, *, vm: str | None = None) -> ApiError:
        """Make the exception of the class that goes with the body's code."""
        return _rebuild(body.code, body.message, body.cause, body.remedy, vm)


class BadRequest(ApiError, code="bad_request"):
    """The request is malformed or a value is out of range."""


class Unauthorized(ApiError, code="unauthorized"):
    """The token is missing or wrong."""


class NotFound(ApiError, code="not_found"):
    """No VM, image or file of that name."""


class Conflict(ApiError, code="conflict"):
    """The name is taken, the VM is in the wrong state, or the image is in use."""


class NoCapacity(ApiError, code="no_capacity"):
    """It does not fit into memory, or into a limit; the text has the figures."""


class GuestError(ApiError, code="guest"):
    """The guest's agent did not answer in time, or refused."""


class QemuError(ApiError, code="qemu"):
    """QEMU or its shim failed, or is of a version that can't be used."""


class HostError(ApiError, code="host"):
    """The host lacks something: userfaultfd, QEMU, disk space."""


class PageLost(ApiError, code="page_lost"):
    """A page could be had from no source; its VM was stopped."""


class TimeoutExceeded(ApiError, code="timeout"):
    """Something took longer than its bound, on the daemon's side or on this one."""


class InternalError(ApiError, code="internal"):
    """A bug of vmfork."""


class ExecFailed(VmforkError):
    """A program that was run with ``check=True`` did not end with 0."""

    def __init__(self, argv: tuple[str, ...], result: ExecResult, *, vm: str | None = None) -> None:
        if result.timed_out:
            how = "was killed at its time limit"
        elif result.signal is not None:
            how = f"was ended by signal {result.signal}"
        else:
            how = f"ended with exit code {result.exit_code}"
        # The end of stderr, since that is where the reason stands.
        tail = result.stderr_text[-400:].strip()
        text = f"{' '.join(argv)!r} in `{vm}` {how}"
        super().__init__(f"{text}: {tail}" if tail else text)
        self.argv = argv
        self.result = result
        self.vm = vm

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_exec, (self.argv, self.result, self.vm))


def _rebuild(
    code: str, message: str, cause: str | None, remedy: str | None, vm: str | None
) -> ApiError:
    kind = ApiError._by_code.get(code, ApiError)
    return kind(code, message, cause=cause, remedy=remedy, vm=vm)


def _rebuild_exec(argv: tuple[str, ...], result: ExecResult, vm: str | None) -> ExecFailed:
    return ExecFailed(argv, result, vm=vm)
