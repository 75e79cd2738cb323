"""The other QEMU: that of bookworm-backports. The shim, the device state and the machine must fit both."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import vmfork

from harness import places
from harness.daemon import Daemon
from harness.family import Family
from harness.freepages import wait_until_reported

MakeDaemon = Callable[..., Daemon]

#: Put there by `mk/qemu-backports.sh`.
PACKAGES = places.CACHE / "qemu-backports"


@pytest.fixture(scope="module")
def qemu(need: Callable[[object, str], None]) -> Iterator[Path]:
    """Unpacked where the user that QEMU runs as gets to."""
    packages = sorted(PACKAGES.glob("*.deb"))
    need(packages, "the packages of bookworm-backports' QEMU: mk/qemu-backports.sh")
    folder = Path(tempfile.mkdtemp(prefix="vf-qemu-", dir=places.SHORT_TMP))
    try:
        folder.chmod(0o711)
        for package in packages:
            subprocess.run(["dpkg", "-x", package, folder], check=True)
        folder.chmod(0o711)  # dpkg gives it the mode that the package says
        yield folder / "usr/bin/qemu-system-x86_64"
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def vm(make_daemon: MakeDaemon, image: str, qemu: Path) -> Iterator[vmfork.VM]:
    daemon = make_daemon("--qemu", str(qemu))
    daemon.add_image(image)
    daemon.start()
    with daemon.client() as client:
        assert not (client.version().qemu or "7.").startswith("7.")
        yield client.run(image, name="other", cpus=2, memory_mib=256)


@pytest.mark.limit(300)
def test_memory_is_exact_on_it(vm: vmfork.VM, seed: int) -> None:
    family = Family.begin(vm, seed, mib=24, threads=2)
    for _generation in range(2):
        clones = family.fork(family.parent, 2)
        grandchild = family.fork(clones[0], 1)[0]
        family.verify_all()
        for member in (grandchild, clones[0]):
            family.scribble(member)
        family.verify_all()
    assert all(clone.vm.inspect().qemu_version == vm.inspect().qemu_version for clone in family.members)


@pytest.mark.soak
@pytest.mark.limit(300)
def test_a_program_forks_its_vm_on_it(vm: vmfork.VM) -> None:
    vm.copy_in(places.ROOT / "examples/python/parallel.py", "/run/parallel.py")
    output = vm.exec(["python3", "/run/parallel.py", "4"], check=True).stdout_text
    total, alone = output.splitlines()[-1].removeprefix("4 workers: ").split("; alone: ")
    assert total == alone


@pytest.mark.soak
def test_what_its_guest_reports_free_costs_nothing(vm: vmfork.VM) -> None:
    mib = 80
    vm.exec(f"head -c {mib}M /dev/zero | tr '\\0' x > /dev/shm/f", check=True)
    used = vm.inspect().memory.private_pages
    vm.exec("rm /dev/shm/f", check=True)
    freed_pages = mib * 256 * 0.75  # the guest keeps some
    wait_until_reported(vm)
    left = vm.inspect().memory.private_pages
    assert left < used - freed_pages
    # What it has freed and not reported: single pages, for the most part.
    kept = max(0, mib * 256 - (used - left)) * 4096
    clone = vm.fork(1).raise_for_errors()[0]
    # What the programs and the kernel need besides.
    clone.exec("head -c 1M /dev/zero | tr '\\0' y > /dev/shm/f", check=True)
    before = clone.inspect().memory.demand_bytes
    clone.exec(f"head -c {mib}M /dev/zero | tr '\\0' y > /dev/shm/f", check=True)
    memory = clone.inspect().memory
    assert memory.private_pages > freed_pages
    fetched = memory.demand_bytes - before
    print(f"fetched {fetched / 2**20:.1f} MiB of {mib}; {kept / 2**20:.1f} MiB were free and not reported")
    # Without the reports it were all of them. The kernel's `struct page` are 1.6 of the 4 %.
    # The 4 MiB are what the kernel does meanwhile; they do not grow with what is filled.
    assert fetched < kept + (0.04 * mib + 4) * (1 << 20), (before, memory)
