"""Stored snapshots: taken from running VMs, started again and again, on top of one another, damaged and not.

The store is looked into from outside where a test is about damage: files are what `docs/format.md` says.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vmfork

from harness import guests
from harness.daemon import Daemon
from harness.family import Family
from harness.programs import Memcheck
from harness.waits import eventually

MakeDaemon = Callable[..., Daemon]

#: What a store holds is counted here: it holds nothing of another test's.
BOOTS = True

#: 5 MiB, of which a third repeats.
DATA = b"".join(hashlib.sha256(f"{n}".encode()).digest() * (1 + n % 2) for n in range(110_000))
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def own(make_daemon: MakeDaemon, image: str) -> Daemon:
    """A daemon of the test's own, to be killed and started again."""
    daemon = make_daemon()
    daemon.add_image(image)
    return daemon.start()


@pytest.fixture
def loaded(vm: vmfork.VM) -> vmfork.VM:
    """A VM with something in its memory."""
    vm.write_file("/run/data", DATA)
    return vm


@pytest.fixture
def keep(client: vmfork.Client) -> Iterator[Callable[..., vmfork.SnapshotInfo]]:
    """Take a snapshot that goes with the test."""
    names: list[str] = []

    def keep(vm: vmfork.VM, name: str, **options: object) -> vmfork.SnapshotInfo:
        names.append(name)
        return client.snapshots.create(vm.name, name, wait=True, **{"record_s": 0, **options})  # type: ignore[arg-type]

    yield keep
    for name in reversed(names):
        try:
            client.snapshots.remove(name, cascade=True)
        except vmfork.NotFound:
            pass


def web(client: vmfork.Client) -> vmfork.VM:
    """A VM that has booted, on a daemon whose store lists nothing."""
    return guests.warm(client, "default", name="web", memory_mib=256, whole=True)


def digest(vm: vmfork.VM) -> str:
    return vm.exec("sha256sum /run/data", check=True).stdout_text.split()[0]


def start(client: vmfork.Client, name: str, count: int = 1, **options: object) -> list[vmfork.VM]:
    return client.snapshots.start(name, count, **options).raise_for_errors()  # type: ignore[arg-type]


def chunks(daemon: Daemon) -> list[Path]:
    return sorted((daemon.state / "snapshots" / "chunks").glob("*/*"))


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_snapshot_outlives_its_vm_and_its_daemon(own: Daemon) -> None:
    with own.client() as client:
        vm = web(client)
        vm.write_file("/run/data", DATA)
        vm.exec("(while :; do date +%s.%N > /run/tick; sleep 0.01; done) >/dev/null 2>&1 &")
        boot_id = vm.exec("cat /proc/sys/kernel/random/boot_id").stdout
        snapshot = client.snapshots.create("web", "warm", wait=True)
        assert snapshot.state is vmfork.SnapshotState.READY
        assert len(DATA) < snapshot.own_bytes < 256 << 20, "what is zero takes nothing"
        assert snapshot.stored_bytes < snapshot.own_bytes
        assert digest(vm) == DIGEST, "it runs on"
    own.kill()
    own.start()
    with own.client() as client:
        assert [one.name for one in client.snapshots.list()] == ["warm"]
        vms = start(client, "warm", 3)
        assert [vm.name for vm in vms] == ["warm.1", "warm.2", "warm.3"]
        for vm in vms:
            assert vm.exec("cat /proc/sys/kernel/random/boot_id").stdout == boot_id
            assert vm.exec("hostname").stdout_text == f"{vm.name}\n"
            assert digest(vm) == DIGEST
            tick = vm.read_file("/run/tick")
            eventually(lambda vm=vm, tick=tick: vm.read_file("/run/tick") not in (tick, b""), 10, "it ticks on")
            clock = float(vm.exec("date +%s").stdout_text)
            assert abs(clock - float(vms[0].exec("date +%s").stdout_text)) < 5
        assert len({vm.exec("cat /etc/machine-id").stdout for vm in vms}) == 3, "each has an identity of its own"
        assert len({vm.exec("head -c 16 /dev/urandom | od -x").stdout for vm in vms}) == 3
        vms[0].write_file("/run/data", b"mine")
        assert digest(vms[1]) == DIGEST
        [late] = start(client, "warm")
        assert digest(late) == DIGEST, "now that others have its pages in memory"
        memory = late.inspect().memory
        assert memory.source.chunk > 0


#: Ways to store all pages.
FULL: list[dict[str, Any]] = [{}, {"compression": "none"}, {"keep_zero_pages": True}]


@pytest.mark.limit(900)
@pytest.mark.parametrize(
    ("cpus", "full"),
    [(2, 1), (2, 3), pytest.param(1, 3, marks=pytest.mark.soak)],
)
@pytest.mark.slow
def test_memory_is_that_of_the_instant(
    make_daemon: MakeDaemon, image: str, seed: int, cpus: int, full: int
) -> None:
    """As for forks in `test_memory_exact.py`: every byte is known at any instant."""
    daemon = make_daemon()
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        vm = client.run(image, name="exact", cpus=cpus, memory_mib=256)
        family = Family.begin(vm, seed, mib=32, threads=cpus)
        for turn, options in enumerate(FULL[:full]):
            family.let_it_write()
            client.snapshots.create("exact", f"full{turn}", wait=True, full=True, record_s=0, **options)
        family.let_it_write()
        delta = client.snapshots.create("exact", "delta", wait=True, record_s=0)
        assert delta.base == f"full{full - 1}"
        family.parent("verify")
    # Nothing of it is left in memory.
    daemon.kill()
    daemon.start()
    with daemon.client() as client:
        starts = [*zip((f"full{turn}" for turn in range(full)), ("none", "demand", "none"), strict=False), ("delta", "all")]
        for name, prefetch in starts:
            one, two = (Memcheck(vm) for vm in start(client, name, 2, prefetch=prefetch))
            one("verify")
            two("resume")
            family.let_it_write()
            # A VM of a snapshot is forked like any other, with its pages half in the store.
            clone = Memcheck(two.vm.fork(1).raise_for_errors()[0])
            clone("verify")
            one("scribble", 7)
            two("verify")
            # And a snapshot of that is a delta.
            under = client.snapshots.create(clone.vm.name, f"{name}-next", wait=True, record_s=0)
            assert under.base == name
            for member in (one, two, clone):
                member.vm.remove(force=True)
            again = Memcheck(start(client, f"{name}-next")[0])
            again("verify")
            again.vm.remove(force=True)


def test_one_that_waits_does_not_hold_up_the_vm(client: vmfork.Client, loaded: vmfork.VM, keep: Callable[..., vmfork.SnapshotInfo]) -> None:
    """Without `wait` the answer comes when the VM runs on; the store is written meanwhile."""
    snapshot = client.snapshots.create(loaded.name, "later", record_s=0)
    try:
        assert snapshot.state in (vmfork.SnapshotState.WRITING, vmfork.SnapshotState.READY)
        assert loaded.exec("true").exit_code == 0
        with pytest.raises(vmfork.Conflict, match="later"):
            client.snapshots.create(loaded.name, "later", record_s=0)
        eventually(lambda: client.snapshots.get("later").state is vmfork.SnapshotState.READY, 60, "it is ready")
    finally:
        eventually(lambda: client.snapshots.get("later").state is not vmfork.SnapshotState.WRITING, 60, "it is written")
        client.snapshots.remove("later")


def test_deltas_hold_what_differs_and_keep_their_base(
    client: vmfork.Client, loaded: vmfork.VM, keep: Callable[..., vmfork.SnapshotInfo]
) -> None:
    base = keep(loaded, "base")
    loaded.write_file("/run/more", b"more of it")
    delta = keep(loaded, "delta")
    assert delta.base == "base"
    assert delta.own_bytes < base.own_bytes / 2
    with pytest.raises(vmfork.Conflict, match="`delta` is a delta"):
        client.snapshots.remove("base")
    [vm] = start(client, "delta")
    assert vm.read_file("/run/more") == b"more of it"
    assert digest(vm) == DIGEST
    below = keep(vm, "below")
    assert below.base == "delta"
    vm.remove(force=True)
    flat = client.snapshots.flatten("delta")
    assert flat.base is None
    assert client.snapshots.remove("base").names == ("base",)
    [vm] = start(client, "below")
    assert vm.read_file("/run/more") == b"more of it"
    assert digest(vm) == DIGEST
    vm.remove(force=True)
    assert sorted(client.snapshots.remove("delta", cascade=True).names) == ["below", "delta"]


def test_equal_pages_are_stored_once(
    daemon: Daemon, client: vmfork.Client, loaded: vmfork.VM, keep: Callable[..., vmfork.SnapshotInfo]
) -> None:
    one = keep(loaded, "one", full=True)
    before = sum(chunk.stat().st_size for chunk in chunks(daemon))
    two = keep(loaded, "two", full=True)
    grown = sum(chunk.stat().st_size for chunk in chunks(daemon)) - before
    assert two.shared_bytes > one.stored_bytes / 2
    assert grown < before / 2
    client.snapshots.remove("one")
    assert client.snapshots.verify("two").damage == ()


def test_vms_go_on_whose_snapshot_is_removed(
    daemon: Daemon, client: vmfork.Client, loaded: vmfork.VM, keep: Callable[..., vmfork.SnapshotInfo]
) -> None:
    keep(loaded, "gone", full=True)
    [vm] = start(client, "gone", prefetch="none")
    client.snapshots.remove("gone")
    with pytest.raises(vmfork.NotFound):
        client.snapshots.get("gone")
    assert digest(vm) == DIGEST, "its pages are still there"
    clone = vm.fork(1).raise_for_errors()[0]
    vm.remove(force=True)
    assert digest(clone) == DIGEST, "for its clones, too"


def test_a_damaged_page_ends_the_vm_and_gives_it_no_other_bytes(own: Daemon, seed: int) -> None:
    with own.client() as client:
        vm = web(client)
        vm.write_file("/run/data", DATA)
        client.snapshots.create("web", "warm", wait=True, record_s=0)
        vm.remove(force=True)
        assert client.snapshots.verify("warm").damage == ()
    own.stop()
    own.start()
    rng = random.Random(seed)
    for path in chunks(own):
        content = bytearray(path.read_bytes())
        at = rng.randrange(len(content))
        content[at] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    with own.client() as client:
        damage = client.snapshots.verify("warm").damage
        assert len(damage) == len(chunks(own)), "all of it is told, not the first only"
        started = client.snapshots.start("warm", prefetch="none", timeout_s=20)
        assert not list(started), "it can't come up"
        [error] = started.errors
        assert isinstance(error, vmfork.PageLost), error
        assert "chunks/" in str(error) and "is damaged" in str(error), error
        assert client.vms() == []


def test_what_is_not_a_snapshot_is_told_apart(own: Daemon) -> None:
    with own.client() as client:
        vm = web(client)
        client.snapshots.create("web", "good", wait=True, record_s=0)
        folder = own.state / "snapshots" / "snapshots"
        shutil.copytree(folder / "good", folder / "cut")
        descriptor = folder / "cut" / "descriptor.json"
        descriptor.write_bytes(descriptor.read_bytes()[:-40])
        by_name = {one.name: one for one in client.snapshots.list()}
        assert by_name["good"].state is vmfork.SnapshotState.READY
        assert by_name["cut"].state is vmfork.SnapshotState.FAILED
        assert "descriptor.json" in (by_name["cut"].reason or "")
        with pytest.raises(vmfork.VmforkError, match="descriptor.json"):
            client.snapshots.start("cut")
        with pytest.raises(vmfork.NotFound, match="unknown"):
            client.snapshots.start("unknown")
        for bad in ("../x", ".x", "a/b", ""):
            with pytest.raises(vmfork.VmforkError):
                client.snapshots.create("web", bad)
        vm.kill()
        with pytest.raises(vmfork.Conflict, match="not running"):
            client.snapshots.create("web", "late")
        assert "late" not in {one.name for one in client.snapshots.list()}


@pytest.mark.slow
def test_a_daemon_that_dies_while_writing_leaves_nothing(own: Daemon) -> None:
    with own.client() as client:
        vm = web(client)
        vm.exec("head -c 90M /dev/urandom > /dev/shm/x", check=True)
        before = len(chunks(own))
        client.snapshots.create("web", "half", record_s=0)
        eventually(lambda: len(chunks(own)) > before + 20, 30, "it writes", every_s=0.005)
    own.kill()
    assert chunks(own)
    own.start()
    with own.client() as client:
        assert client.snapshots.list() == []
        assert chunks(own) == [], "what it had begun is cleared away"


def test_another_disk_or_qemu_is_refused_naming_both(own: Daemon) -> None:
    """By what is written down of the snapshot: the store believes it, the daemon compares."""
    with own.client() as client:
        web(client)
        client.snapshots.create("web", "warm", wait=True, record_s=0)
        root = own.state / "images" / "default" / "image.json"
        text = root.read_text()
        digest = client.snapshots.get("warm")
        assert digest.qemu_version in client.version().qemu
        assert digest.machine.startswith("pc-i440fx-")
        # The image was built anew: another root disk by the same name.
        content = text.replace(_root_hash(text), "f" * 64)
        root.unlink()
        root.write_text(content)
        try:
            with pytest.raises(vmfork.Conflict, match="root disk of hash"):
                client.snapshots.start("warm")
            with pytest.raises(vmfork.Conflict, match="root disk of hash"):
                client.snapshots.start("warm", force=True)
        finally:
            root.write_text(text)
        assert list(start(client, "warm"))


def _root_hash(image_json: str) -> str:
    files = json.loads(image_json)["files"]
    return str(files["root.img"]["blake3"])


def test_what_a_vm_touches_is_loaded_before_the_next_asks(own: Daemon) -> None:
    with own.client() as client:
        vm = web(client)
        vm.write_file("/run/data", DATA)
        vm.write_file("/run/other", DATA[::-1])
        # The VM reads one of the two. Its end ends the recording.
        client.snapshots.create("web", "warm", wait=True, record_s=120)
        assert digest(vm) == DIGEST
        vm.remove(force=True)
        eventually(lambda: client.snapshots.profile("warm").working_set_pages, 30, "what it touched is kept")
        profile = client.snapshots.profile("warm")
        assert profile.runs == 1
        assert len(DATA) / 4096 < profile.working_set_pages < 256 * 256
        assert profile.clusters[0].first_access_ms <= profile.clusters[-1].first_access_ms

        [plain] = start(client, "warm", prefetch="none")
        assert digest(plain) == DIGEST
        without = plain.inspect().memory
        plain.remove(force=True)
        [quick] = start(client, "warm", prefetch="working_set")
        eventually(lambda: quick.inspect().memory.cache_present_pages >= profile.working_set_pages * 0.9, 20, "it is loaded")
        before = quick.inspect().memory.store_faults.remote
        assert digest(quick) == DIGEST
        loaded = quick.inspect().memory
        assert loaded.store_faults.remote - before < without.store_faults.remote / 4
        client.snapshots.reset_profile("warm")
        assert client.snapshots.profile("warm").runs == 0


@pytest.mark.slow
def test_a_hydrated_vm_needs_the_store_no_more(own: Daemon) -> None:
    with own.client() as client:
        vm = web(client)
        vm.write_file("/run/data", DATA)
        client.snapshots.create("web", "warm", wait=True, record_s=0)
        vm.remove(force=True)
        [whole] = start(client, "warm", hydrate_mib_per_s=500)
        own_pages = client.snapshots.get("warm").own_pages
        eventually(lambda: whole.inspect().memory.cache_present_pages >= own_pages, 60, "all of it is there")
        eventually(lambda: "depend on the store no more" in own.log_tail(), 10, "and that is noticed")
        folder = own.state / "snapshots" / "chunks"

        def is_removed() -> bool:
            # The daemon may be removing chunks that no snapshot names any more.
            shutil.rmtree(folder, ignore_errors=True)
            return not folder.exists()

        eventually(is_removed, 20, "no chunk is left")
        assert digest(whole) == DIGEST
        clone = whole.fork(1).raise_for_errors()[0]
        assert digest(clone) == DIGEST


@pytest.mark.slow
@pytest.mark.limit(300)
def test_snapshots_travel(own: Daemon, make_daemon: MakeDaemon, image: str, tmp_path: Path) -> None:
    """By a stream, and by way of another store; deltas with what they are deltas of."""
    elsewhere = make_daemon()
    elsewhere.add_image(image)
    elsewhere.start()
    depot = tmp_path / "depot"
    with own.client() as here, elsewhere.client() as there:
        vm = web(here)
        vm.write_file("/run/data", DATA)
        here.snapshots.create("web", "base", wait=True, record_s=0)
        vm.write_file("/run/more", b"more")
        here.snapshots.create("web", "delta", wait=True, record_s=0)
        vm.remove(force=True)
        stream = tmp_path / "stream"
        here.snapshots.export("delta", stream)
        there.snapshots.import_(stream)
        [vm] = start(there, "delta")
        assert vm.read_file("/run/more") == b"more" and digest(vm) == DIGEST
        vm.remove(force=True)
        there.snapshots.remove("base", cascade=True)
        # A stream that ends early leaves nothing.
        (tmp_path / "cut").write_bytes(stream.read_bytes()[:-1000])
        with pytest.raises(vmfork.VmforkError):
            there.snapshots.import_(tmp_path / "cut")
        assert there.snapshots.list() == []

        pushed = here.snapshots.push("delta", str(depot))
        assert sorted(pushed.names) == ["base", "delta"]
        assert here.snapshots.push("delta", str(depot)).names == (), "all of it is there"
        there.snapshots.pull("delta", str(depot))
        [vm] = start(there, "delta")
        assert vm.read_file("/run/more") == b"more" and digest(vm) == DIGEST
        eventually(lambda: there.snapshots.get("delta").state is vmfork.SnapshotState.READY, 60, "all of it is here")
        shutil.rmtree(depot)
        [vm] = start(there, "delta")
        assert digest(vm) == DIGEST
        for bad in ("ftp://x/y", "/proc/nothing/here"):
            with pytest.raises(vmfork.VmforkError):
                here.snapshots.push("delta", bad)


def test_another_machine_type_refuses_the_start_and_not_each_vm(make_daemon: MakeDaemon, image: str, tmp_path: Path) -> None:
    """The same QEMU by its version, whose machine type has another name."""
    theirs = shutil.which("qemu-system-x86_64")
    assert theirs is not None
    before = Path(theirs).read_bytes()
    # It looks for its modules and its firmware beside its own folder.
    (tmp_path / "bin").mkdir()
    for folder in ("lib", "share"):
        (tmp_path / folder).symlink_to(Path("/usr") / folder)
    qemu = tmp_path / "bin" / "qemu-system-x86_64"
    for above in (tmp_path, *tmp_path.parents[: len(tmp_path.relative_to(tempfile.gettempdir()).parts) - 1]):
        above.chmod(above.stat().st_mode | 0o711)

    def install(content: bytes) -> None:
        qemu.unlink(missing_ok=True)
        qemu.write_bytes(content)
        qemu.chmod(0o755)

    install(before)
    daemon = make_daemon("--qemu", str(qemu), "--pool", "0")
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        web(client)
        client.snapshots.create("web", "warm", wait=True, record_s=0)
        client.vm("web").remove(force=True)
        machine = client.snapshots.get("warm").machine
        other = machine[:-1] + "x"
        install(before.replace(f"{machine}-machine\0".encode(), f"{other}-machine\0".encode()))
        with pytest.raises(vmfork.Conflict, match=f"machine type `{machine}`, this host has `{other}`"):
            client.snapshots.start("warm", 2)
        assert client.vms(ended=True) == []
        install(before)
        assert len(start(client, "warm", 2)) == 2
