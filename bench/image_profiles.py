"""A host with all of an image, and with a profile of what a VM reads of it."""

from __future__ import annotations

import vmfork

from . import workloads
from . import world as w

MEMORY_MIB = 256


def pull_whole(world: w.World, daemon: w.Daemon, client: vmfork.Client) -> None:
    """The image comes to a host's store, as from a registry: profiles are of such images alone."""
    folder = str(daemon.folder / "images")
    client.push_image(world.image, folder)
    client.remove_image(world.image)
    client.pull_image(world.image, folder)
    w.eventually(lambda: client.images()[0].remote is None, 120, "all of it is in the store")


def learn(world: w.World, client: vmfork.Client) -> None:
    """A VM works, and the host makes the image's profile of that."""
    with client.run(world.image, memory_mib=MEMORY_MIB, labels={"workload": "bench"}) as vm:
        vm.exec(workloads.IMAGE_WORK, check=True, timeout_s=300)
        vm.exec(f"sleep {workloads.WORTH_S}", check=True)
    w.eventually(lambda: client.image_profile(world.image).workloads != (), 20, "it is learnt")
