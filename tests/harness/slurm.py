"""A real Slurm on hosts of a cluster: munged and slurmctld on the first, a slurmd on each, as the nodes `h0`, `h1` and so on."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .hosts import Hosts
from .leftovers import spawn
from .places import SHORT_TMP
from .waits import eventually

NEEDS = ("munged", "slurmctld", "slurmd", "salloc", "sbatch", "scontrol", "scancel", "squeue", "sinfo")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin"
START_S = 60.0


def find(program: str) -> str:
    found = shutil.which(program, path=PATH)
    if found is None:
        reason = f"`{program}` is missing (apt install slurm-wlm munge)"
        if os.environ.get("VMFORK_TEST_STRICT"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


class Slurm:
    """Each node has ``cpus`` CPUs and 4 GiB, as Slurm counts."""

    def __init__(self, net: Hosts, cpus: int) -> None:
        self.net = net
        self.folder = Path(tempfile.mkdtemp(prefix="vfsl-", dir=SHORT_TMP))
        self.folder.chmod(0o755)
        self.conf = self.folder / "slurm.conf"
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.programs = {name: find(name) for name in NEEDS}
        self.conf.write_text(self._configuration(cpus))

    def _configuration(self, cpus: int) -> str:
        short = socket.gethostname().split(".")[0]
        at = self.folder
        lines = [
            "ClusterName=vmforktest",
            f"SlurmctldHost={short}({self.net.addresses[0]})",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={at}/munge.socket",
            "CredType=cred/munge",
            f"StateSaveLocation={at}/state",
            f"SlurmdSpoolDir={at}/spool.%n",
            f"SlurmctldPidFile={at}/slurmctld.pid",
            f"SlurmdPidFile={at}/slurmd.%n.pid",
            f"SlurmctldLogFile={at}/slurmctld.log",
            f"SlurmdLogFile={at}/slurmd.%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SwitchType=switch/none",
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU_Memory",
            "SlurmdParameters=config_overrides",
            "AccountingStorageType=accounting_storage/none",
            "JobAcctGatherType=jobacct_gather/none",
            "ReturnToService=2",
            "KillWait=1",
        ]
        for number, address in enumerate(self.net.addresses):
            lines.append(
                f"NodeName=h{number} NodeHostname={short} NodeAddr={address} Port={6818 + number} CPUs={cpus} RealMemory=4096 State=UNKNOWN"
            )
        lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
        return "\n".join(lines) + "\n"

    def _start(self, host: int, program: str, *arguments: str) -> None:
        argv = [*self.net.prefix(host), self.programs[program], *arguments]
        log = self.folder / f"{program}-{len(self.daemons)}.out"
        with log.open("ab") as out:
            env = {**os.environ, "SLURM_CONF": str(self.conf)}
            self.daemons.append(spawn(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd="/"))

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(bytes([7]) * 128)
        key.chmod(0o400)
        files = {"key-file": key, **{f"{name}-file": self.folder / f"munge.{name}" for name in ("pid", "log", "seed")}}
        options = [f"--{option}={file}" for option, file in files.items()]
        munge = self.folder / "munge.socket"
        self._start(0, "munged", "--force", "--foreground", f"--socket={munge}", *options)
        eventually(munge.exists, START_S, "munged listens")
        self._start(0, "slurmctld", "-D", "-f", str(self.conf))
        for number in range(len(self.net.names)):
            self._start(number, "slurmd", "-D", "-f", str(self.conf), "-N", f"h{number}")
        idle = f"{len(self.net.names)} idle"
        eventually(lambda: self.run("sinfo", "--noheader", "--format=%D %t").strip() == idle, START_S, "all nodes are idle", every_s=0.3)

    def run(self, program: str, *arguments: str) -> str:
        """What a command prints, on the first host."""
        argv = [*self.net.prefix(0), self.programs[program], *arguments]
        env = {**os.environ, "SLURM_CONF": str(self.conf), "LC_ALL": "C"}
        done = subprocess.run(argv, capture_output=True, timeout=60, check=False, env=env, text=True)
        return done.stdout + done.stderr

    def jobs(self) -> dict[str, str]:
        """The nodes of each job that holds some."""
        lines = self.run("squeue", "--noheader", "--states=RUNNING", "--format=%i %N").split("\n")
        return dict(line.split(maxsplit=1) for line in lines if line)

    def waiting(self) -> set[str]:
        """Jobs that have no nodes yet."""
        return set(self.run("squeue", "--noheader", "--states=PENDING", "--format=%i").split())

    def close(self) -> None:
        """By their ids, the last first. They keep nothing that is worth a gentle end."""
        while self.daemons:
            daemon = self.daemons.pop()
            daemon.kill()
            daemon.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def slurm_on(net: Hosts, cpus: int) -> Iterator[Slurm]:
    made = Slurm(net, cpus)
    try:
        made.start()
        yield made
    finally:
        made.close()
