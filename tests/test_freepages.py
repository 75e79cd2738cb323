"""Free pages cost nothing: a clone that allocates new memory fetches next to nothing."""

from __future__ import annotations

import time

import pytest
import vmfork

from harness import guests, programs
from harness.freepages import wait_until_reported

MIB = 1 << 20
#: 4 % of 1 GiB. A clone reads its kernel and programs, too, and that does not grow with what it
#: fills. It was seen to be 2 to 10 MiB on an idle host, and up to 25 MiB on a busy one.
FETCHED_BYTES_MAX = 0.04 * 1024 * MIB


def fetched_while_filling(clone: vmfork.VM, mib: int) -> int:
    """How many bytes a clone fetched on demand for memory that it newly allocates."""
    before = clone.inspect().memory
    clone.exec(["/run/touch", str(mib)], check=True)
    after = clone.inspect().memory
    assert after.private_pages - before.private_pages >= mib * 256 * 0.98 or (
        # The guest may have reported it all free again already.
        after.zero_pages > before.zero_pages
    )
    fetched = after.demand_bytes - before.demand_bytes
    print(f"fetched on demand while filling {mib} MiB: {fetched / MIB:.1f} MiB")
    return fetched


@pytest.mark.slow
@pytest.mark.limit(400)
def test_a_clone_that_fills_1_gib_afresh_fetches_at_most_4_percent(client: vmfork.Client, image: str) -> None:
    with guests.warm(client, image, name="fresh", memory_mib=2048) as vm:
        programs.put(vm, "touch")
        wait_until_reported(vm)
        with vm.fork(1) as clones:
            (clone,) = clones.raise_for_errors()
            assert fetched_while_filling(clone, 1024) <= FETCHED_BYTES_MAX


@pytest.mark.slow
@pytest.mark.limit(400)
@pytest.mark.parametrize(("memory_mib", "mib"), [(512, 256), pytest.param(1536, 1024, marks=pytest.mark.soak)])
def test_what_was_used_and_reported_free_is_zero_in_snapshots(
    client: vmfork.Client, image: str, memory_mib: int, mib: int
) -> None:
    with guests.warm(client, image, name="used", memory_mib=memory_mib) as vm:
        programs.put(vm, "touch")
        used = vm.inspect().memory.private_pages
        vm.exec(["/run/touch", str(mib)], check=True)
        wait_until_reported(vm)
        assert vm.inspect().memory.private_pages < used + 64 * 256
        with vm.fork(1) as clones:
            (clone,) = clones.raise_for_errors()
            assert fetched_while_filling(clone, mib) <= FETCHED_BYTES_MAX


@pytest.mark.slow
@pytest.mark.limit(300)
def test_an_idle_clone_fetches_and_holds_little(client: vmfork.Client, image: str) -> None:
    with guests.warm(client, image, name="idle", memory_mib=512) as vm, vm.fork(2) as clones:
        time.sleep(10)
        for clone in clones.raise_for_errors():
            memory = clone.inspect().memory
            print(f"demand {memory.demand_bytes / MIB:.1f} MiB, private {memory.private_pages / 256:.1f} MiB")
            assert memory.demand_bytes <= 0.04 * 512 * MIB
            assert memory.private_pages * 4096 <= 8 * MIB
