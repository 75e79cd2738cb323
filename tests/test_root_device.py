"""Roots that are persistent memory: `vmfork run --root-device pmem|block`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable

import pytest
import vmfork

from harness import images
from harness.cli import Cli
from harness.daemon import Daemon

MIB = 1 << 20

#: Sums of 150 files. Programs have read few of them before.
SUMS = "find /usr/lib /usr/share /etc -type f -size -600k | sort | head -n 150 | xargs sha256sum | sha256sum"
#: In KiB.
CACHED = "awk '/^Cached:/ {print $2}' /proc/meminfo"
TOTAL = "sed -n 's/MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo"
READ_ALL = "find /usr/lib -xdev -type f | xargs cat | wc -c"


def _sums(vm: vmfork.VM) -> str:
    return vm.exec(SUMS, check=True, timeout_s=120).stdout_text


def _cached_by_reading(vm: vmfork.VM) -> tuple[int, int]:
    """By how much reading makes the guest's page cache grow, and how much was read, in bytes."""
    before = int(vm.exec(CACHED, check=True).stdout_text)
    read = int(vm.exec(READ_ALL, check=True, timeout_s=120).stdout_text)
    return (int(vm.exec(CACHED, check=True).stdout_text) - before) << 10, read


@pytest.fixture
def own(make_daemon: Callable[..., Daemon], image: str) -> Daemon:
    """A daemon of the test's own, to be killed and started again."""
    daemon = make_daemon()
    daemon.add_image(image)
    return daemon.start()


@pytest.mark.slow
@pytest.mark.limit(400)
def test_a_root_in_persistent_memory_is_the_images_and_needs_no_page_cache(
    client: vmfork.Client, daemon: Daemon, image: str, cli: Cli
) -> None:
    cli("run", image, "--name", "block", "--root-device", "block")
    block = client.vm("block")
    with block, client.run(image, name="pmem") as vm:
        assert block.inspect().root_device == vmfork.RootDevice.BLOCK
        assert vm.inspect().root_device == vmfork.RootDevice.PMEM
        assert "pmem (" in cli.text("inspect", "pmem") and "block (asked for)" in cli.text("inspect", "block")
        assert vm.exec("cat /sys/block/pmem0/queue/dax", check=True).stdout_text == "1\n"
        assert block.exec("ls /sys/block", check=True).stdout_text.split() == ["vda"]
        cached, read = _cached_by_reading(vm)
        assert read > 40 * MIB and cached < read // 20
        cached, read = _cached_by_reading(block)
        assert cached > read // 2
        wanted = _sums(block)
        assert _sums(vm) == wanted
        # The guest can't write to what all VMs share, but to its root.
        file = daemon.state / "images" / image / "root.img"
        before = hashlib.sha256(file.read_bytes()).hexdigest()
        assert vm.exec("dd if=/dev/pmem0 of=/dev/null bs=4096 count=1", check=True).exit_code == 0
        for command in (
            "dd if=/dev/zero of=/dev/pmem0 bs=4096 count=1 conv=notrunc",
            "blockdev --setrw /dev/pmem0; dd if=/dev/zero of=/dev/pmem0 bs=4096 count=1 oflag=direct conv=notrunc",
        ):
            assert vm.exec(command).exit_code != 0
        assert hashlib.sha256(file.read_bytes()).hexdigest() == before
        vm.exec("echo mine > /usr/lib/os-release && rm /usr/bin/awk && sync", check=True)
        assert vm.exec("cat /usr/lib/os-release", check=True).stdout_text == "mine\n"
        # A fork by the block device alone has its own page cache and the same files.
        (clone,) = block.fork(1).raise_for_errors()
        assert clone.inspect().root_device == vmfork.RootDevice.BLOCK and _sums(clone) == wanted
        clone.remove(force=True)
        # It takes 1/64 of the image's size, and no bounce buffers of 64 MiB.
        block_kib, pmem_kib = (int(one.exec(TOTAL, check=True).stdout_text) for one in (block, vm))
        assert 0 < block_kib - pmem_kib < 16 << 10


@pytest.mark.slow
@pytest.mark.limit(400)
def test_clones_and_snapshots_read_the_same_persistent_memory(own: Daemon, image: str) -> None:
    with own.client() as client:
        vm = client.run(image, name="web", root_device=vmfork.RootDevice.PMEM)
        wanted = _sums(client.run(image, name="block", root_device=vmfork.RootDevice.BLOCK))
        client.vm("block").remove(force=True)
        clones = vm.fork(2).raise_for_errors()
        (deep,) = clones[0].fork(1).raise_for_errors()
        for one in (vm, *clones, deep):
            assert one.inspect().root_device == vmfork.RootDevice.PMEM
            assert _sums(one) == wanted
        clones[0].exec("echo mine > /usr/lib/os-release", check=True)
        client.snapshots.create("web.1", "warm", wait=True)
        for one in (vm, *clones, deep):
            one.remove(force=True)
    own.kill()
    own.start()
    with own.client() as client:
        (vm,) = client.snapshots.start("warm", names=["again"]).raise_for_errors()
        assert vm.inspect().root_device == vmfork.RootDevice.PMEM
        assert vm.exec("cat /usr/lib/os-release", check=True).stdout_text == "mine\n"
        cached, read = _cached_by_reading(vm)
        assert cached < read // 20
        vm.remove(force=True)


@pytest.mark.slow
def test_what_cant_be_persistent_memory_is_read_from_a_block_device(
    make_daemon: Callable[..., Daemon], image: str
) -> None:
    daemon = make_daemon()
    daemon.add_image(image)
    # What an earlier version built says nothing of it; and a kernel that does not load the driver.
    for name in ("old", "blind"):
        copy = daemon.state / "images" / name
        images.link_into(copy.parent, image)
        shutil.copytree(copy.parent / image, copy, copy_function=os.link)
        described = json.loads((copy / "image.json").read_text()) | {"name": name}
        if name == "old":
            del described["root_pmem"]
        else:
            described["cmdline"] += " module_blacklist=nd_pmem"
        (copy / "image.json").unlink()
        (copy / "image.json").write_text(json.dumps(described))
    daemon.start()
    with daemon.client() as client:
        with pytest.raises(vmfork.BadRequest, match="does not know persistent memory"):
            client.run("old", root_device=vmfork.RootDevice.PMEM)
        with pytest.raises(vmfork.BadRequest, match="not a file of an image"):
            client.run(image, root=vmfork.Root.DISK, root_device=vmfork.RootDevice.PMEM)
        assert client.vms() == []
        for name, why in {"old": "does not know", "blind": "can't mount it with DAX"}.items():
            with client.run(name) as vm:
                detail = vm.inspect()
                assert detail.root_device == vmfork.RootDevice.BLOCK and why in detail.root_device_reason
                assert vm.exec("echo x > /usr/lib/x && cat /usr/lib/x", check=True).stdout_text == "x\n"
