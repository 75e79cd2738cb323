"""Fixtures of the black-box tests: `daemon`, `client`, `image`, `booted`, `vm`, `cli`,
`three_hosts`.

They run what was built (`out/`, or VMFORK_OUT) as users do. At the end of every daemon they assert
that nothing of it is left: no process, mount, socket, cgroup or file in /dev/shm. Every test has a
time limit (`@pytest.mark.limit(seconds)`). What cannot run here is skipped with the missing thing
named, and counted at the end; VMFORK_TEST_STRICT=1 makes failures of skips.

Tests run in several processes at a time: `pytest -n 3 --dist loadgroup`. Those that share a fixture
of their module are one group and stay in one process; each other test is its own.
`@pytest.mark.alone` keeps other tests from running meanwhile, for tests that measure the whole
host. `LONGEST` names the modules that start first.

A test is marked `slow` if it takes more than about 20 s of a core and a smaller one has much of its
promise. `make test` leaves it out; VMFORK_TEST_ALL=1, CI and `make soak` run it.
`-m soak` runs the long cases; VMFORK_SOAK=N repeats them N times as often. VMFORK_TEST_TIMES names
a file that gets the time of each test. `make test` leaves out what has passed with the same inputs
(harness/unchanged.py); VMFORK_TEST_ALL=1 runs it.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "sdk" / "python" / "src")]

import vmfork  # noqa: E402

from harness import daemon as daemons  # noqa: E402
from harness import guests, images, places, processes, unchanged  # noqa: E402
from harness.cli import Cli  # noqa: E402
from harness.cluster import Cluster, cluster_of  # noqa: E402
from harness.daemon import Daemon  # noqa: E402
from harness.waits import LimitExceeded, limit  # noqa: E402

# A shell starts what runs in the background with SIGINT ignored, and programs inherit that. Tests
# type Ctrl-C at what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

_PASSED = pytest.StashKey[unchanged.Passed]()

LIMIT_DEFAULT_S = 180.0
LIMIT_SETUP_S = 1500.0  # the image may have to be built
LIMIT_TEARDOWN_S = 120.0

#: The groups that take longest start first, so that no process ends long after the others. By
#: `VMFORK_TEST_TIMES`.
LONGEST = (
    "test_readme",
    "three_hosts",
    "test_disk_programs",
    "test_disks",
    "test_snapshots",
    "test_fork",
    "test_faults",
    "test_cluster_multicast",
    "test_cluster_page_transfer",
    "test_cluster_slurm",
    "test_freepages",
    "test_forkapi",
    "test_ctrl_c",
    "test_volumes",
    "test_disk_snapshots",
    "test_disk_resize",
    "test_root_disk",
    "test_cluster_faults",
    "test_cluster_quotas",
    "test_cluster_images",
    "test_lifecycle",
    "test_cluster_tickets",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "limit(seconds): how long the test may take")
    config.addinivalue_line("markers", "soak: a long case; run by `-m soak`, left out without")
    config.addinivalue_line("markers", "slow: left out by `make test`, run by VMFORK_TEST_ALL=1 make test")
    config.addinivalue_line("markers", "alone: no test of another process runs meanwhile")
    if not config.pluginmanager.hasplugin("xdist"):
        config.addinivalue_line("markers", "xdist_group(name): tests of one group run in one process")
    config.stash[_PASSED] = unchanged.Passed(HERE)
    processes.become_subreaper()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat tests with long cases. Each turn is a test of its own, with its own seed and time
    limit."""
    turns = int(os.environ.get("VMFORK_SOAK", 1))
    sets = (one for mark in metafunc.definition.iter_markers("parametrize") for one in mark.args[1])
    cases = (mark for one in sets for mark in getattr(one, "marks", ()))
    if turns > 1 and any(mark.name == "soak" for mark in (*metafunc.definition.iter_markers(), *cases)):
        metafunc.fixturenames.append("soak_turn")
        metafunc.parametrize("soak_turn", range(1, turns + 1), indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A group for each module, the longest first, and last those that wait for the host.

    The same in all processes.
    """
    _leave_out(config, items)
    for item in items:
        if item.get_closest_marker("xdist_group"):
            continue
        if "three_hosts" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("three_hosts"))
        elif _shares_with_its_module(item):
            item.add_marker(pytest.mark.xdist_group(_module(item)))

    def rank(item: pytest.Item) -> int:
        mark = item.get_closest_marker("xdist_group")
        if mark is None and item.get_closest_marker("alone"):
            return len(LONGEST) + 1
        name = mark.args[0] if mark else _module(item)
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=rank)


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What has passed with the same inputs."""
    passed = config.stash[_PASSED]
    left_out = [item for item in items if _name(item.nodeid) in passed.tests(item.path)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _module(item: pytest.Item) -> str:
    return item.path.stem


def _name(nodeid: str) -> str:
    """A test's, within its module. xdist adds `@` and the group."""
    return nodeid.partition("::")[2].partition("@")[0]


def _shares_with_its_module(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return any(one.scope == "module" for used in definitions for one in used)


# -- tests that want the host for themselves
# ---------------------------------------------------------


def _lock(name: str, how: int) -> contextlib.closing[object]:
    folder = places.CACHE / "test-locks"
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / name).open("w")
    fcntl.flock(file, how)
    return contextlib.closing(file)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tests share the host, and those that are marked `alone` wait until they have it."""
    if item.get_closest_marker("alone"):
        # At the gate no others start, so that the wait ends with those that run.
        with _lock("gate", fcntl.LOCK_EX), _lock("host", fcntl.LOCK_EX):
            yield
    else:
        with _lock("gate", fcntl.LOCK_SH):
            lock = _lock("host", fcntl.LOCK_SH)
        with lock:
            yield


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
    if report.failed:
        for daemon in daemons.running:
            report.sections.append((f"log of vmforkd in {daemon.folder}", daemon.log_tail()))
            for name, text in daemon.consoles().items():
                report.sections.append((f"console of {name} in {daemon.folder}", text))


#: Seconds by test and phase; in the process that the others report to.
_times: dict[str, dict[str, float]] = {}


#: Outcomes by test, of its phases; in the same process.
_outcomes: dict[str, set[str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _times.setdefault(report.nodeid, {})[report.when or ""] = round(report.duration, 3)
    _outcomes.setdefault(report.nodeid, set()).add(f"{report.when} {report.outcome}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    path = os.environ.get("VMFORK_TEST_TIMES")
    if path:
        part = Path(f"{path}.new")
        part.write_text(json.dumps(_times, indent=1) + "\n")
        part.replace(path)
    _keep(session)


def _keep(session: pytest.Session) -> None:
    """Modules that have passed as a whole are known from now on, and those that failed no more."""
    passed = session.config.stash[_PASSED]
    good = {"setup passed", "call passed", "teardown passed", "setup skipped", "call skipped"}
    tests = collections.defaultdict(set)
    failed_groups, failed = set(), set()
    for nodeid, outcomes in _outcomes.items():
        module = nodeid.partition("::")[0]
        group = nodeid.rpartition("@")[2]
        tests[module].add(nodeid)
        if not outcomes <= good or "teardown passed" not in outcomes:
            failed.add(module)
            failed_groups.add(group)
    # Tests of several modules share hosts.
    for module, nodeids in tests.items():
        if any(nodeid.rpartition("@")[2] in failed_groups for nodeid in nodeids):
            failed.add(module)
    passed.forget(Path(module).stem for module in failed)
    is_whole = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    for module in set(tests) - failed if is_whole else ():
        # One that was skipped is run again.
        ran = {_name(nodeid) for nodeid in tests[module] if "call passed" in _outcomes[nodeid]}
        passed.keep(HERE / module, ran | passed.tests(HERE / module))
    if passed.count() and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if left_out := config.stash[_PASSED].count():
        terminalreporter.section("not run again", yellow=True)
        why = "they have passed with the same programs, files and host"
        terminalreporter.write_line(f"{left_out} tests: {why}; VMFORK_TEST_ALL=1 runs them")
    # The reports are counted, and not the places that missed something. Tests that share a fixture
    # are skipped one by one, and some of them in other processes.
    reasons = (report.longrepr for report in terminalreporter.stats.get("skipped", ()))
    skipped = collections.Counter(str(reason[2]) for reason in reasons if isinstance(reason, tuple))
    if skipped:
        terminalreporter.section("not tested here", yellow=True)
        for why, count in skipped.most_common():
            terminalreporter.write_line(f"{count} skipped: {why.removeprefix('Skipped: ')}")


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


@pytest.fixture
def soak_turn(request: pytest.FixtureRequest) -> int:
    """Which repetition of a long case this is."""
    turn: int = request.param
    return turn


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
def booted(request: pytest.FixtureRequest, daemon: Daemon, image: str) -> Iterator[vmfork.VM]:
    """A VM shared by a module's tests: fork it, don't change it.

    It comes from a store, where a VM of its shape was put that had booted. With `BOOTS = True` in
    the module it boots here.
    """
    with daemon.client() as client:
        if getattr(request.module, "BOOTS", False):
            vm = client.run(image, name="base", memory_mib=512)
        else:
            vm = guests.warm(client, image, name="base")
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


# -- hosts of a cluster --------------------------------------------------------------------------


@pytest.fixture(scope="session")
def three_hosts(image: str) -> Iterator[Cluster]:
    """One cluster with the default settings, for all tests that leave its hosts as they are."""
    with cluster_of(3, image) as made:
        yield made
