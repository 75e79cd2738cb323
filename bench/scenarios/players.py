"""Many hosts need one image at the same moment, and a program on each reads what a VM reads.

vmTorrent's evaluation of many hosts (§4.4) on real daemons. Two cores run few VMs, so players
replay what a VM has read, with the time that it took in between. Two baselines are in the same
run: one server on demand, which is the paper's `cs_d`, and a file in memory.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import places
from harness.cli import Cli

from .. import cluster as c
from .. import image_profiles, traces, workloads
from .. import world as w

TITLE = "What a VM reads of an image, on many hosts at once"

RATE = "100mbit"
RATE_BYTES_PER_S = 12_500_000
#: Hosts that play.
COUNTS = (1, 4, 16)
COUNTS_QUICK = (1, 4)
PORT = 10809
PLAYER = w.ROOT / "bench" / "host" / "player.py"
DEMAND, NO_PROFILE, PROFILE, LOCAL = "one server, on demand", "peers, no profile", "peers, profile", "a file"


def _learn(world: w.World, made: c.Cluster) -> str:
    """What a VM reads, as a player takes it. A second VM then makes the image's profile."""
    daemon, client = made.daemons[0], made.clients[0]
    image_profiles.pull_whole(world, daemon, client)
    begin, began = daemon.log.stat().st_size, w.now_ms()
    with client.run(world.image, memory_mib=image_profiles.MEMORY_MIB) as vm:
        vm.exec(workloads.IMAGE_WORK, check=True, timeout_s=300)
        end_us, end = round((w.now_ms() - began) * 1000), daemon.log.stat().st_size
    told = daemon.log.read_bytes()[begin:end].decode(errors="replace").splitlines()
    client.reset_image_profile(world.image)
    image_profiles.learn(world, client)
    return "".join(f"{one.us} {one.page} {one.pages}\n" for one in traces.runs(traces.reads(told, end_us)))


def _end(processes: Sequence[subprocess.Popen[str]], how: int) -> None:
    for process in processes:
        process.send_signal(how)
    for process in processes:
        process.wait(30)


class Stage:
    """Hosts but the first, each with a player that waits for its image."""

    def __init__(self, world: w.World, made: c.Cluster, folder: Path, trace: str) -> None:
        self.world, self.made, self.trace = world, made, trace
        self.root = w.images.store() / world.image / "root.img"
        self.folders = [folder / f"h{number}" for number in range(len(made.daemons))]
        for one in self.folders:
            one.mkdir()

    def _player(self, number: int, file: Path) -> subprocess.Popen[str]:
        argv = [*self.made.net.prefix(number), sys.executable, str(PLAYER), str(file)]
        player = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert player.stdin is not None and player.stdout is not None
        player.stdin.write(self.trace)
        player.stdin.flush()
        assert player.stdout.readline() == "ready\n"
        return player

    def _file(self, number: int, way: str) -> Path:
        if way == LOCAL:
            return self.root
        folder = self.folders[number]
        return folder.with_suffix(".img") if way == DEMAND else folder / f"{self.world.image}.img"

    def _serve(self, number: int) -> subprocess.Popen[str]:
        """A host shows the image as a file while it comes."""
        argv = [str(places.VMFORK), "image", "serve", "--json", self.world.image, str(self.folders[number])]
        server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=Cli(self.made.daemons[number]).env)
        assert server.stdout is not None
        assert server.stdout.readline() != ""
        return server

    def _mount(self, number: int) -> subprocess.Popen[str]:
        """A host shows as a file what the first one's NBD server has."""
        file = self._file(number, DEMAND)
        file.touch()
        remote = f"server.type=inet,server.host={self.made.net.addresses[0]},server.port={PORT}"
        argv = [
            *self.made.net.prefix(number), "qemu-storage-daemon",
            "--blockdev", f"driver=nbd,node-name=image,read-only=on,{remote}",
            "--export", f"fuse,id=image,node-name=image,mountpoint={file}",
        ]  # fmt: skip
        server = subprocess.Popen(argv, text=True)
        w.eventually(lambda: file.stat().st_size > 0, 30, "it is mounted", every_s=0.005)
        return server

    def play(self, way: str) -> None:
        """All begin at the same moment. Adds how long each took from then on."""
        hosts = range(1, len(self.made.daemons))
        players = [self._player(number, self._file(number, way)) for number in hosts]
        servers: list[subprocess.Popen[str]] = []

        def one(number: int) -> tuple[float, float]:
            begin = w.now_ms()
            if way == DEMAND:
                servers.append(self._mount(number))
            elif way != LOCAL:
                self.made.clients[number].pull_image(self.world.image)
                servers.append(self._serve(number))
            player = players[number - 1]
            out, _ = player.communicate("play\n", timeout=1200)
            assert player.returncode == 0
            return w.now_ms() - begin, float(out.split()[1])

        links, busy = self.made.link_bytes(), w.busy_ms()
        try:
            with ThreadPoolExecutor(len(hosts)) as pool:
                took, waited = zip(*pool.map(one, hosts), strict=True)
        finally:
            _end(servers, signal.SIGINT)
            _end(players, signal.SIGKILL)
        busy = (w.busy_ms() - busy) / w.cores()
        used = [now - then for now, then in zip(self.made.link_bytes(), links, strict=True)]
        labels = {"image": way, "hosts": len(hosts), "links": RATE}
        self.world.figures.series("played_busy_ms", **labels, time="processors, each").add(busy)
        self.world.figures.series("played_link_ms", **labels, time="the busiest link, one way").add(1000 * max(used) / RATE_BYTES_PER_S)
        self.world.figures.series("played_ms", **labels).add(sum(took) / len(took))
        self.world.figures.series("played_last_ms", **labels).add(max(took))
        self.world.figures.series("played_waited_ms", **labels).add(sum(waited) / len(waited))
        self.world.figures.series("played_sent_mib", **labels).add(used[0] / (1 << 20))


@contextlib.contextmanager
def _server(stage: Stage) -> Iterator[None]:
    """The image on the first host, by QEMU's own server."""
    argv = ["qemu-nbd", "--read-only", "--persistent", "--shared=0", "--format=raw", f"--port={PORT}", str(stage.root)]
    process = subprocess.Popen([*stage.made.net.prefix(0), *argv], text=True)
    try:
        yield
    finally:
        _end([process], signal.SIGTERM)


def run(world: w.World) -> None:
    for count in COUNTS_QUICK if world.quick else COUNTS:
        flags = ["--log-level", traces.FILTER_READS]
        with (
            c.cluster(world, count + 1, pool=0, more_flags=flags, rate=RATE) as made,
            tempfile.TemporaryDirectory() as folder,
        ):
            stage = Stage(world, made, Path(folder), _learn(world, made))

            def forget(made: c.Cluster = made) -> None:
                for client in made.clients[1:]:
                    client.remove_image(world.image)

            forget()
            made.clients[0].seed_image(world.image)
            # Each player is a sample.
            times = range(1 if count > 8 else 3)
            world.say(f"{count} hosts, peers with a profile")
            for _ in times:
                stage.play(PROFILE)
                forget()
                stage.play(LOCAL)
            made.clients[0].reset_image_profile(world.image)
            world.say(f"{count} hosts, peers without a profile, and one server")
            for _ in times:
                stage.play(NO_PROFILE)
                forget()
                with _server(stage):
                    stage.play(DEMAND)
