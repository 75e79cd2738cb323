"""Fixtures of the black-box tests: `daemon`, `client`, `image`, `booted`, `vm`, `cli`.

They run what was built (`out/`, or VMFORK_OUT) as users do, and assert at the end of every daemon that
nothing of it is left: no process, mount, socket, cgroup or file in /dev/shm. Every test has a time
limit (`@pytest.mark.limit(seconds)`). What cannot run here is skipped with the missing thing named, and
counted at the end; VMFORK_TEST_STRICT=1 makes failures of skips.
"""

from __future__ import annotations

import collections
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "sdk" / "python" / "src")]

import vmfork  # noqa: E402

from harness import daemon as daemons  # noqa: E402
from harness import images, processes  # noqa: E402
from harness.cli import Cli  # noqa: E402
from harness.daemon import Daemon  # noqa: E402
from harness.waits import LimitExceeded, limit  # noqa: E402

LIMIT_DEFAULT_S = 180.0
LIMIT_SETUP_S = 1500.0  # the image may have to be built
LIMIT_TEARDOWN_S = 120.0

_skipped: collections.Counter[str] = collections.Counter()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "limit(seconds): how long the test may take")
    config.addinivalue_line("markers", "slow: takes minutes; left out by `-m 'not slow'`")
    processes.become_subreaper()


# -- time limits ---------------------------------------------------------------------------------


def _limited(item: pytest.Item, seconds: float, phase: str) -> Iterator[None]:
    with limit(seconds, f"{phase} of {item.name}"):
        outcome = yield  # type: ignore[misc]
        # Raised here, where the alarm is still set, so that a late one cannot hit pytest itself.
        del outcome


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    yield from _limited(item, LIMIT_SETUP_S, "the set-up")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    mark = item.get_closest_marker("limit")
    yield from _limited(item, mark.args[0] if mark else LIMIT_DEFAULT_S, "the test")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield from _limited(item, LIMIT_TEARDOWN_S, "the clean-up")


# -- what failed, what is missing ----------------------------------------------------------------


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    # Here, and not where the thing was missed: tests that share a fixture are skipped one by one.
    if call.excinfo is not None and isinstance(call.excinfo.value, pytest.skip.Exception):
        _skipped[str(call.excinfo.value.msg)] += 1
    if report.failed:
        for daemon in daemons.running:
            report.sections.append((f"log of vmforkd in {daemon.folder}", daemon.log_tail()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skipped:
        terminalreporter.section("not tested here", yellow=True)
        for why, count in _skipped.most_common():
            terminalreporter.write_line(f"{count} skipped: {why}")


def _need(condition: object, what: str) -> None:
    if condition:
        return
    if os.environ.get("VMFORK_TEST_STRICT"):
        pytest.fail(f"missing: {what}")
    pytest.skip(f"missing: {what}")


@pytest.fixture(scope="session")
def need() -> Callable[[object, str], None]:
    """`need(condition, "the thing")` skips the test, loudly, unless the condition holds."""
    return _need


@pytest.fixture
def seed() -> Iterator[int]:
    """Of what a test does at random; a failure shows it, VMFORK_TEST_SEED repeats it."""
    seed = int(os.environ.get("VMFORK_TEST_SEED", 0)) or random.SystemRandom().getrandbits(32)
    # pytest shows this where the test fails.
    print(f"VMFORK_TEST_SEED={seed}")
    yield seed


# -- the daemon ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def image() -> str:
    """The default guest image; built if it is not there yet."""
    return images.build()


@pytest.fixture
def make_daemon() -> Iterator[Callable[..., Daemon]]:
    """A factory of daemons with flags of the test's own; not started yet."""
    made: list[Daemon] = []

    def make(*flags: str, **options: object) -> Daemon:
        daemon = Daemon(flags, **options)  # type: ignore[arg-type]
        made.append(daemon)
        return daemon

    yield make
    _close_all(made)


@pytest.fixture(scope="module")
def daemon(request: pytest.FixtureRequest, image: str) -> Iterator[Daemon]:
    """One daemon for the tests of a module, with the flags in its `DAEMON_FLAGS`."""
    daemon = Daemon(getattr(request.module, "DAEMON_FLAGS", ()))
    daemon.add_image(image)
    try:
        yield daemon.start()
    finally:
        _close_all([daemon])


def _close_all(made: list[Daemon]) -> None:
    failures: list[BaseException] = []
    for daemon in reversed(made):
        try:
            daemon.close()
        except (AssertionError, LimitExceeded) as error:
            failures.append(error)
    if failures:
        raise failures[0]


@pytest.fixture
def client(daemon: Daemon) -> Iterator[vmfork.Client]:
    """The SDK on the module's daemon. What the test leaves but the module's VM is removed."""
    with daemon.client() as client:
        keep = {vm.id for vm in client.vms(ended=True)}
        yield client
        for vm in client.vms(ended=True):
            if vm.id not in keep:
                try:
                    vm.remove(force=True)
                except vmfork.NotFound:
                    pass


@pytest.fixture(scope="module")
def booted(daemon: Daemon, image: str) -> Iterator[vmfork.VM]:
    """A VM that booted, shared by a module's tests: fork it, don't change it."""
    with daemon.client() as client:
        vm = client.run(image, name="base", memory_mib=512)
        yield vm
        try:
            vm.remove(force=True)
        except vmfork.VmforkError:
            pass  # the daemon's own end is the judge of what is left


@pytest.fixture
def vm(client: vmfork.Client, booted: vmfork.VM) -> vmfork.VM:
    """A VM of the test's own: a clone of the module's, which is what clones are good for."""
    clone = booted.fork(1).raise_for_errors()[0]
    clone = client.vm(clone.name)
    return clone


@pytest.fixture
def cli(daemon: Daemon) -> Cli:
    """`cli("ps", "--json")` runs the command line on the module's daemon."""
    return Cli(daemon)


