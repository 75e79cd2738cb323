"""A VM boots from an image that its host pulls just then, and works: with a profile and without.

As in vmTorrent's evaluation: of one host (§4.3), and of as many as two cores can run (§4.4). Beside
it, in the same run: the same from an image that is all there, as a file and in the host's store.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import vmfork

from harness import metrics

from .. import cluster as c
from .. import image_profiles
from .. import world as w
from ..workloads import IMAGE_WORK, WORTH_S

TITLE = "A VM of an image that still arrives"

RATES = ("1gbit", "100mbit")
MEMORY_MIB = image_profiles.MEMORY_MIB
#: Hosts that each run a VM at the same moment.
COUNTS = (2, 4)


def _run(client: vmfork.Client, image: str, begin: float, *, record: bool = False) -> float:
    """Boot and work. → ms since `begin`."""
    with client.run(image, memory_mib=MEMORY_MIB, labels={"workload": "bench"}) as vm:
        vm.exec(IMAGE_WORK, check=True, timeout_s=300)
        took = w.now_ms() - begin
        if record:
            vm.exec(f"sleep {WORTH_S}", check=True)
        return took


def _whole(client: vmfork.Client) -> None:
    w.eventually(lambda: client.images()[0].remote is None, 300, "all of it is here", every_s=0.05)


def run(world: w.World) -> None:
    _one(world)
    for count in () if world.quick else COUNTS:
        _many(world, count)


def _one(world: w.World) -> None:
    series, image = world.figures.series, world.image
    for rate in RATES:
        with c.cluster(world, 3, pool=0, rate=rate) as made:
            seeder, other, client = made.clients
            for one in (other, client):
                one.remove_image(image)
            seeder.seed_image(image)

            def streamed(way: str, rate: str = rate, made: c.Cluster = made) -> None:
                """The image is asked for, and then the VM."""
                client, daemon = made.clients[2], made.daemons[2]
                waits = metrics.read(daemon).value("vmfork_pulled_chunks_total", why="waited")
                begin = w.now_ms()
                client.pull_image(image)
                took = _run(client, image, begin, record=True)
                series("streamed_ms", image=way, links=rate).add(took)
                _whole(client)
                waits = metrics.read(daemon).value("vmfork_pulled_chunks_total", why="waited") - waits
                series("streamed_waits", image=way, links=rate).add(waits)

            for _ in world.rounds(f"boot and work at {rate}", share=0.15):
                streamed("streamed, no profile")
                client.remove_image(image)
                # Another host runs it once.
                other.pull_image(image)
                _run(other, image, w.now_ms(), record=True)
                w.eventually(lambda: other.image_profile(image).workloads != (), 20, "it is learnt")
                _whole(other)
                streamed("streamed, with its profile")
                series("streamed_ms", image="all in the store", links=rate).add(_run(client, image, w.now_ms()))
                client.pull_image(image, wait=True)
                series("streamed_ms", image="a file", links=rate).add(_run(client, image, w.now_ms()))
                for one in (other, client):
                    one.remove_image(image)


def _many(world: w.World, count: int) -> None:
    """VMs on many hosts, each from an image that its host pulls. One host has all of it."""
    image, rate = world.image, RATES[-1]
    with c.cluster(world, count + 1, pool=0, rate=rate) as made:
        seeder, clients = made.clients[0], made.clients[1:]
        for client in clients:
            client.remove_image(image)
        image_profiles.pull_whole(world, made.daemons[0], seeder)
        seeder.seed_image(image)

        def all_run(way: str, *, pulls: bool) -> None:
            begin = w.now_ms()

            def one(client: vmfork.Client) -> float:
                if pulls:
                    client.pull_image(image)
                return _run(client, image, begin)

            with ThreadPoolExecutor(count) as pool:
                took = list(pool.map(one, clients))
            world.figures.series("streamed_many_ms", image=way, hosts=count, links=rate).add(sum(took) / count)

        def forget() -> None:
            for client in clients:
                client.remove_image(image)

        for _ in world.rounds(f"{count} hosts boot and work at {rate}", share=0.1):
            seeder.reset_image_profile(image)
            all_run("streamed, no profile", pulls=True)
            forget()
            image_profiles.learn(world, seeder)
            all_run("streamed, with its profile", pulls=True)
            for client in clients:
                client.pull_image(image, wait=True)
            all_run("a file", pulls=False)
            forget()
