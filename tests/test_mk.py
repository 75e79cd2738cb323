"""The scripts behind `make`: what they leave alone matters as much as what they do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from harness import leftovers, places, processes
from harness.waits import eventually

MK = places.ROOT / "mk"


def _script(name: str, *args: str, **environment: str) -> None:
    subprocess.run([MK / name, *args], check=True, timeout=60, env={**os.environ, **environment})


def test_what_a_killed_daemon_left_is_ended_and_nothing_of_its_neighbours(tmp_path: Path) -> None:
    state, cgroups = tmp_path / "state", tmp_path / "cgroups" / "vmfork"
    for folder in ("vms/0123", "vms/4567"):
        (state / folder).mkdir(parents=True)
    for vm in ("0123", "4567", "89ab"):
        (cgroups / f"vm-{vm}").mkdir(parents=True)
    # To the kernel a cgroup with processes is busy.
    (cgroups / "vm-4567" / "busy").touch()

    def marked(owner: Path | str, mark: str = "VMFORK_OWNER") -> subprocess.Popen[bytes]:
        return leftovers.spawn(["sleep", "95"], env={**os.environ, mark: str(owner)})

    ours, holder = marked(state), marked(state, "VMFORK_HOLDER")
    others = [marked(f"{state}2"), marked(state / "below"), marked(tmp_path), marked(tmp_path, "VMFORK_HOLDER")]
    try:
        _script("leftovers.sh", str(cgroups.parent), VMFORK_STATE=f"{state}/../state")
        assert (ours.wait(10), holder.wait(10)) == (-9, -9)
        assert all(other.poll() is None for other in others)
        assert {one.name for one in cgroups.iterdir()} == {"vm-4567", "vm-89ab"}
    finally:
        for process in (ours, holder, *others):
            process.kill()
            process.wait(10)


#: A guest image whose build does not end, in a process below the one that builds it.
_ENDLESS_IMAGE = """
import pathlib, subprocess
def build():
    process = subprocess.Popen(["sleep", "95"])
    pathlib.Path("../pid.new").write_text(str(process.pid))
    pathlib.Path("../pid.new").rename("../pid")
    process.wait()
"""


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_runs_beside_the_tests_ends_with_them(tmp_path: Path, interrupted: bool) -> None:
    # A checkout of nothing else than the scripts, whose check fails when it is told to.
    scripts = {"build.sh": "#!/bin/sh\n", "check.sh": "#!/bin/sh\nuntil [ -e fail ]; do sleep 0.1; done\nexit 7\n"}
    (tmp_path / "mk").mkdir()
    for name in ("test.sh", "beside.sh", "env.sh"):
        shutil.copy(MK / name, tmp_path / "mk" / name)
    for name, text in scripts.items():
        (tmp_path / "mk" / name).write_text(text)
        (tmp_path / "mk" / name).chmod(0o755)
    (tmp_path / "tests" / "harness").mkdir(parents=True)
    (tmp_path / "tests" / "harness" / "images.py").write_text(_ENDLESS_IMAGE)
    # Its target folder is its own.
    env = {name: value for name, value in os.environ.items() if name != "CARGO_TARGET_DIR"}
    run = leftovers.spawn([str(tmp_path / "mk" / "test.sh")], env=env, start_new_session=True)
    try:
        eventually((tmp_path / "pid").exists, 30, "an image is built")
        beside = processes.read(int((tmp_path / "pid").read_text()))
        assert beside is not None and beside.comm == "sleep"
        if interrupted:
            os.killpg(run.pid, signal.SIGINT)
        else:
            (tmp_path / "fail").touch()
        assert run.wait(30) == (130 if interrupted else 7)
        eventually(lambda: not beside.is_alive(), 5, "it has ended")
    finally:
        run.kill()
        run.wait(10)
        for one in leftovers.orphans():
            if one.comm == "sleep":
                one.kill()


def test_install_puts_a_whole_installation_and_uninstall_takes_it_away(tmp_path: Path) -> None:
    places.require_build()
    destination = tmp_path / "root"
    where = {"DESTDIR": str(destination), "PREFIX": "/opt/vmfork", "VMFORK_OUT": str(places.OUT)}
    # Twice: an upgrade.
    for _ in range(2):
        _script("install.sh", **where)
    prefix = destination / "opt/vmfork"
    unit = (prefix / "lib/systemd/system/vmforkd.service").read_text()
    (started,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    assert started == "ExecStart=/opt/vmfork/bin/vmforkd"
    holder = (prefix / "lib/systemd/system/vmfork-holder.service").read_text()
    (started,) = [line for line in holder.splitlines() if line.startswith("ExecStart=")]
    assert started == "ExecStart=/opt/vmfork/lib/vmfork/vmfork-holder"
    for path in (
        "bin/vmfork",
        "bin/vmforkd",
        "lib/vmfork/libvmfork_tap.so",
        "lib/vmfork/vmfork-agent",
        "lib/vmfork/vmfork-holder",
        "lib/vmfork/images/default.json",
        "share/bash-completion/completions/vmfork",
        "share/man/man3/vmfork.3",
        "share/man/man3/sf_clone.3",
    ):
        assert (prefix / path).stat().st_size > 0, path
    assert not [path for path in prefix.rglob("*") if path.suffix in (".new", ".old")]
    done = subprocess.run([prefix / "bin/vmfork", "--version"], capture_output=True, timeout=20, check=True)
    assert done.stdout.startswith(b"vmfork ")
    (prefix / "share/man/man3/other.3").write_text("somebody else's")
    _script("install.sh", "--remove", **where)
    left = [path.relative_to(prefix) for path in prefix.rglob("*") if not path.is_dir()]
    assert left == [Path("share/man/man3/other.3")]
