"""Free pages cost nothing: a clone that allocates afresh fetches next to nothing."""

from __future__ import annotations

import time

import pytest
import vmfork

from harness import programs
from harness.waits import eventually

MIB = 1 << 20


@pytest.mark.limit(400)
def test_a_clone_that_fills_1_gib_afresh_fetches_at_most_4_percent(client: vmfork.Client, image: str) -> None:
    with client.run(image, name="fresh", memory_mib=2048) as vm:
        programs.put(vm, "touch")
        with vm.fork(1) as clones:
            (clone,) = clones.raise_for_errors()
            before = clone.inspect().memory
            clone.exec(["/run/touch", "1024"], check=True)
            after = clone.inspect().memory
            fetched = after.demand_bytes - before.demand_bytes
            print(f"fetched on demand while filling 1 GiB: {fetched / MIB:.1f} MiB")
            assert after.private_pages - before.private_pages >= 1024 * 256 * 0.98 or (
                # The guest may have reported it all free again already.
                after.zero_pages > before.zero_pages
            )
            assert after.demand_bytes <= 0.04 * 1024 * MIB


@pytest.mark.limit(400)
def test_what_was_used_and_reported_free_is_zero_in_snapshots(client: vmfork.Client, image: str) -> None:
    with client.run(image, name="used", memory_mib=1024) as vm:
        programs.put(vm, "touch")
        vm.exec(["/run/touch", "600"], check=True)
        used = vm.inspect().memory.private_pages
        eventually(
            lambda: vm.inspect().memory.private_pages < used - 500 * 256 or used < 300 * 256,
            30,
            "the guest has reported its free pages",
            every_s=0.5,
        )
        with vm.fork(1) as clones:
            (clone,) = clones.raise_for_errors()
            clone.exec(["/run/touch", "600"], check=True)
            assert clone.inspect().memory.demand_bytes <= 0.04 * 600 * MIB


@pytest.mark.limit(300)
def test_an_idle_clone_fetches_and_holds_little(client: vmfork.Client, image: str) -> None:
    with client.run(image, name="idle", memory_mib=512) as vm, vm.fork(2) as clones:
        time.sleep(10)
        for clone in clones.raise_for_errors():
            memory = clone.inspect().memory
            print(f"demand {memory.demand_bytes / MIB:.1f} MiB, private {memory.private_pages / 256:.1f} MiB")
            assert memory.demand_bytes <= 0.04 * 512 * MIB
            assert memory.private_pages * 4096 <= 8 * MIB
