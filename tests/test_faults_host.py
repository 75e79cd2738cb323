"""What the host or the image lacks: a clear error each, with its cause and what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import vmfork

from harness import guests, images, initrd, leftovers, programs
from harness.cli import Cli
from harness.daemon import Daemon
from harness.waits import eventually
from harness.world import complete, refused

MakeDaemon = Callable[..., Daemon]

MIB = 1 << 20


def _check(client: vmfork.Client, name: str) -> vmfork.Check:
    (check,) = [check for check in client.doctor().checks if check.name == name]
    return check


# -- userfaultfd, QEMU ---------------------------------------------------------------------------


def _masked(*paths: str) -> list[str]:
    """A prefix that runs a program with these files replaced by /dev/null, for it alone."""
    mounts = " && ".join(f"mount --bind /dev/null {path}" for path in paths)
    return ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]


def _hidden(folder: Path) -> list[str]:
    """A prefix that runs a program with a /dev of its own, which lacks userfaultfd."""
    keep = "null zero full random urandom tty"
    script = (
        f"mkdir -p {folder} && mount -t tmpfs dev {folder} && mkdir {folder}/pts {folder}/shm"
        f" && for n in {keep}; do touch {folder}/$n && mount --bind /dev/$n {folder}/$n; done"
        f" && mount --rbind {folder} /dev && exec \"$@\""
    )
    return ["unshare", "--mount", "sh", "-c", script, "sh"]


@pytest.mark.limit(120)
@pytest.mark.parametrize("how", ["hidden", "something else"])
def test_no_userfaultfd(make_daemon: MakeDaemon, image: str, how: str) -> None:
    daemon = make_daemon()
    daemon.prefix = _hidden(daemon.folder / "dev") if how == "hidden" else _masked("/dev/userfaultfd")
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        if how == "hidden":
            check = _check(client, "userfaultfd")
            assert check.status is vmfork.CheckStatus.FAILED
            assert check.remedy
        text = refused(lambda: client.run(image), "host", "qemu")
        assert "userfaultfd" in text
        assert client.vms() == []
        assert [process for process in daemon.processes() if process.is_qemu] == []


@pytest.mark.slow
@pytest.mark.limit(120)
def test_no_qemu(make_daemon: MakeDaemon, image: str) -> None:
    daemon = make_daemon()
    # It may be installed while the daemon runs.
    missing = daemon.folder / "qemu-system-x86_64"
    daemon.flags = ["--qemu", str(missing), "--pool", "0"]
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        check = _check(client, "qemu")
        assert check.status is vmfork.CheckStatus.FAILED
        assert check.remedy
        assert client.version().qemu is None
        text = refused(lambda: client.run(image), "host")
        assert str(missing) in text
        assert "install" in text
        assert client.vms() == []
        done = Cli(daemon)("doctor", code=1)
        assert b"remedy" in done.stdout + done.stderr
        missing.symlink_to("/usr/bin/qemu-system-x86_64")
        with client.run(image, memory_mib=128) as vm:
            assert vm.inspect().qemu_version
        assert _check(client, "qemu").status is vmfork.CheckStatus.OK


@pytest.mark.limit(120)
@pytest.mark.parametrize(("name", "mappings"), [("qemu-anonymous", 0), ("qemu-twice", 2)])
def test_a_qemu_whose_ram_is_not_one_mapping(
    make_daemon: MakeDaemon, image: str, name: str, mappings: int
) -> None:
    daemon = make_daemon()
    wrapper = daemon.folder / name
    shutil.copy(programs.build("qemuwrap"), wrapper)
    wrapper.chmod(0o755)
    daemon.flags = ["--qemu", str(wrapper)]
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        version = client.version().qemu
        assert version
        text = refused(lambda: client.run(image), "qemu")
        # By name and version, with what was found.
        assert str(wrapper) in text
        assert version in text
        assert f"{mappings} mappings" in text
        assert "--qemu" in text
        assert client.vms() == []
        assert [process for process in daemon.processes() if process.state != "Z"] == []


@pytest.mark.limit(60)
def test_a_program_that_is_no_qemu(make_daemon: MakeDaemon, image: str) -> None:
    daemon = make_daemon("--qemu", "/bin/true")
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        assert "/bin/true" in refused(lambda: client.run(image), "host")


# -- the image -----------------------------------------------------------------------------------


def _with_broken(make_daemon: MakeDaemon, image: str, name: str, replace: Callable[[Path], None]) -> Daemon:
    """A daemon whose copy of the image has one file replaced, and says so truthfully."""
    daemon = make_daemon()
    daemon.add_image(image)
    path = daemon.state / "images" / image / name
    assert path.exists(), f"no {name} in the image's folder: {list(path.parent.iterdir())}"
    path.unlink()  # the file may be a hard link to the shared one
    replace(path)
    path.chmod(0o644)
    described = path.parent / "image.json"
    document = json.loads(described.read_text())
    document["files"][name]["size_bytes"] = path.stat().st_size
    described.unlink()
    described.write_text(json.dumps(document))
    return daemon.start()


@pytest.mark.limit(120)
def test_an_image_that_was_tampered_with(make_daemon: MakeDaemon, image: str) -> None:
    daemon = make_daemon()
    daemon.add_image(image)
    kernel = daemon.state / "images" / image / "kernel"
    kernel.unlink()
    kernel.write_bytes(b"short")
    daemon.start()
    with daemon.client() as client:
        assert "kernel has 5 bytes" in refused(lambda: client.run(image), "host")


@pytest.mark.limit(120)
def test_a_kernel_that_is_none(make_daemon: MakeDaemon, image: str) -> None:
    daemon = _with_broken(make_daemon, image, "kernel", lambda path: path.write_bytes(b"not a kernel" * 999) and None)
    with daemon.client() as client:
        begin = time.monotonic()
        text = refused(lambda: client.run(image, name="broken", boot_timeout_s=20), "qemu", "guest", "timeout")
        assert "broken" in text
        assert time.monotonic() - begin < 60
        assert client.vms() == []
        # Its name is free, and what it said is kept until then.
        (vm,) = client.vms(ended=True)
        assert vm.inspect().reason
        vm.remove()


@pytest.mark.limit(120)
def test_a_kernel_that_panics_at_boot(make_daemon: MakeDaemon, image: str) -> None:
    daemon = _with_broken(make_daemon, image, "initrd", lambda path: path.write_bytes(b"rubbish" * 999) and None)
    with daemon.client() as client:
        text = refused(lambda: client.run(image, name="broken", boot_timeout_s=60), "guest", "timeout")
        assert "vmfork logs broken" in text
        assert client.vms() == []
        # The remedy is good: the log is there, and says why.
        assert "panic" in Cli(daemon).text("logs", "broken").lower()


@pytest.mark.limit(120)
def test_a_guest_that_never_answers(make_daemon: MakeDaemon, image: str) -> None:
    def replace(path: Path) -> None:
        initrd.write(path, {"init": (0o755, programs.build("never").read_bytes())})

    daemon = _with_broken(make_daemon, image, "initrd", replace)
    with daemon.client() as client:
        begin = time.monotonic()
        text = refused(lambda: client.run(image, name="silent", boot_timeout_s=8), "timeout")
        assert 7 < time.monotonic() - begin < 60
        assert "within 8 s" in text
        assert "vmfork logs silent" in text
        assert client.vms() == []
        eventually(lambda: not any(p.is_qemu and p.is_alive() and "-incoming" not in p.command for p in daemon.processes()), 20, "its QEMU is gone")


# -- memory, disk --------------------------------------------------------------------------------


def _available_mib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    raise AssertionError("no MemAvailable in /proc/meminfo")


@pytest.mark.limit(120)
@pytest.mark.alone
def test_what_does_not_fit_into_memory_is_refused_with_the_figures(
    make_daemon: MakeDaemon, image: str, need: Callable[[object, str], None]
) -> None:
    available_mib = _available_mib()
    need(available_mib > 4000, "4 GB of free memory")
    # Every clone counts as if it wrote all of its memory: a few of 512 MiB fit.
    daemon = make_daemon(
        "--memory-reserve-mib", str(available_mib - 3000), "--clone-growth-percent", "100", "--pool", "0"
    )
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        text = refused(lambda: client.run(image, name="big", memory_mib=8192), "no_capacity")
        assert "8192 MiB" in text
        assert text.count("MiB") >= 3, text  # what was asked for, what there is, what is promised
        assert client.vms(ended=True) == []
        vm = guests.warm(client, image, name="web", memory_mib=512)
        text = refused(lambda: vm.fork(40, all_or_nothing=True), "no_capacity")
        assert "MiB" in text
        assert vm.inspect().clones == 0
        fork = vm.fork(40)
        assert 0 < len(fork) < 40
        for error in fork.errors:
            assert "MiB" in complete(error, "no_capacity")
        assert vm.inspect().clones == len(fork)
        # Memory comes back with those that had it.
        for clone in fork:
            clone.remove(force=True)
        assert len(vm.fork(1).raise_for_errors()) == 1


@pytest.mark.limit(120)
def test_guests_make_their_family_no_larger_than_they_may(make_daemon: MakeDaemon, image: str) -> None:
    daemon = make_daemon("--family-vms-max", "4")
    daemon.add_image(image)
    daemon.start()
    ask = "import vmfork; print(vmfork.sf_request_ticket(50).granted)"
    with daemon.client() as client:
        vm = guests.warm(client, image, name="web", memory_mib=256)
        outside = vm.fork(1).raise_for_errors()[0]
        asked = vm.exec(["python3", "-c", ask], check=True)
        assert asked.stdout_text == "2\n", "two of four are there already"
        # What was granted counts while it is held, whichever VM of the family asks.
        refused_there = outside.exec(["python3", "-c", ask])
        assert refused_there.exit_code == 1
        assert "Errno 12" in refused_there.stderr_text
        assert "its family has 4 VMs, and guests may make it 4" in daemon.log_tail()
        vm.fork(3, all_or_nothing=True).raise_for_errors()


@pytest.mark.slow
@pytest.mark.limit(180)
def test_a_full_disk_is_a_clear_error(make_daemon: MakeDaemon, image: str) -> None:
    """The state folder's disk fills up while the daemon runs: VMs go on, new ones are refused."""
    daemon = make_daemon()
    daemon.state.mkdir(mode=0o711)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=0711", "tiny", daemon.state], check=True)
    try:
        (daemon.state / "images").mkdir()
        subprocess.run(["mount", "--bind", images.store(), daemon.state / "images"], check=True)
        daemon.start()
        with daemon.client() as client:
            vm = client.run(image, name="before", memory_mib=128)
            _fill(daemon.state / "filler")
            error = _forked_until_refused(vm)
            assert "No space left on device" in complete(error, "host")
            text = refused(lambda: client.run(image, name="after", memory_mib=128), "host")
            assert "No space left on device" in text
            assert "disk" in text
            done = Cli(daemon)("cp", "before:/etc/passwd", str(daemon.state / "copy"), code=1)
            assert "No space left" in done.stderr.decode()
            assert not (daemon.state / "copy").exists()
            assert vm.exec("seq 1000 > /dev/console; echo well").stdout_text == "well\n"
            check = _check(client, "disk")
            assert check.status is not vmfork.CheckStatus.OK
            assert check.remedy
            (daemon.state / "filler").unlink()
            assert vm.fork(1).raise_for_errors()[0].exec("echo well").stdout_text == "well\n"
        daemon.stop()
        # And one that starts on a full disk. It gets no space by removing what the VMs said, and no
        # line goes into the journal's last block.
        for log in (daemon.state / "vms").glob("*/*"):
            log.write_bytes(b"")
        journal = daemon.state / "journal.jsonl"
        with journal.open("ab") as file:
            file.write(b"\n" * (-journal.stat().st_size % 4096))
        _fill(daemon.state / "filler")
        process = daemon.spawn()
        eventually(lambda: process.poll() is not None, 20, "it ends")
        assert process.returncode == 1
        assert "No space left" in daemon.log_tail()
        assert str(daemon.state) in daemon.log_tail(3)
    finally:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.kill()
        # Its folder is busy as long as it has a holder.
        assert daemon.end_holder() == []
        eventually(lambda: not leftovers.orphans(), 10, "what the daemon had started is gone")
        for mount in (daemon.state / "images", daemon.state):
            if mount.is_mount():
                subprocess.run(["umount", mount], check=True, timeout=20)


def _forked_until_refused(vm: vmfork.VM) -> vmfork.ApiError:
    """Even on a full disk some lines go into the last block of the journal."""
    for _ in range(60):
        fork = vm.fork(1)
        if fork.errors:
            return fork.errors[0]
        fork[0].remove(force=True)
    raise AssertionError("clones are started on a full disk")


def _fill(path: Path) -> None:
    """Take all space that is left."""
    with path.open("wb", buffering=0) as file:
        size = 65536
        while size:
            try:
                if file.write(b"x" * size) < size:
                    size //= 2
            except OSError:
                size //= 2
