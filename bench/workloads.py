"""Programs with a warm data set in a guest, and a fixed job on each, for what starts from stored
snapshots.

With the character of those that Twinkle (INFOCOM 2011, section 5) was measured with: one that is
bound by memory as mcf is, and ordinary ones. All are Debian's, from `guest/image/bench.json`. A job
takes some ten seconds under TCG and prints an answer, the same each time, so that a run that went
wrong is not taken for a fast one.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Reads a part of an image's root that a boot does not read.
IMAGE_WORK = "cat /usr/lib/python3*/*.py /usr/lib/python3*/*/*.py | sha256sum && python3 -c 'import json, asyncio, ssl'"
#: In seconds: a recording of an image's reads that its VM's end cuts short needs it.
WORTH_S = 5.5

#: A program that answers each number that is written to `/run/in` with a line in `/run/out`.
_ASK = "ask() { echo $1 > /run/in; cat /run/out; }"
_FIFOS = "rm -f /run/in /run/out; mkfifo /run/in /run/out"

_PYTHON = """
entries = {f"key{n}": f"value{n}" * 4 for n in range(200_000)}
while True:
    with open("/run/in") as requests:
        step = int(requests.read())
    answer = sum(len(entries[f"key{n}"]) for n in range(0, 200_000, step))
    with open("/run/out", "w") as out:
        out.write(f"{answer}\\n")
"""

_JAVA = """
import java.nio.file.*;
import java.util.*;

public class Service {
    public static void main(String[] arguments) throws Exception {
        Map<String, String> entries = new HashMap<>();
        for (int n = 0; n < 200_000; n++) entries.put("key" + n, "value" + n);
        while (true) {
            int step = Integer.parseInt(Files.readString(Path.of("/run/in")).trim());
            long answer = 0;
            for (int n = 0; n < 200_000; n += step) answer += entries.get("key" + n).length();
            Files.writeString(Path.of("/run/out"), answer + "\\n");
        }
    }
}
"""

_PG = "/usr/lib/postgresql/15/bin"
_SQL = "su - postgres -c 'psql -h /run/pg -AtX bench'"


@dataclass(frozen=True)
class Workload:
    """A program with its data set, and a job on it."""

    name: str
    #: Shell, once, in the VM that is kept. `@SET@`: MiB of the data set, where it can be chosen.
    load: str
    #: Shell; prints the answer.
    job: str


def _service(program: str, text: str, start: str) -> str:
    return f"{_FIFOS}\ncat > /run/{program} <<'END'{text}END\n({start} > /run/log 2>&1 < /dev/null &)\n{_ASK}; ask 1000"


SCAN = Workload(
    "scan",
    "head -c @SET@M /dev/urandom > /dev/shm/set",
    "for n in 1 2; do cat /dev/shm/set | wc -c; done",
)

FILES = Workload(
    "files",
    "cat /usr/bin/* /usr/lib/x86_64-linux-gnu/*.so* 2> /dev/null | head -c @SET@M > /dev/shm/set",
    "for n in 1 2; do ls -lR /usr/bin /usr/lib/x86_64-linux-gnu /usr/share/doc | sort | cksum; done",
)

PYTHON = Workload(
    "python", _service("service.py", _PYTHON, "python3 /run/service.py"), f"{_ASK}; for n in $(seq 30); do ask 4; done | cksum"
)

ALL = [
    SCAN,
    # Bound by the processor.
    Workload("sysbench", "sysbench --version", "sysbench cpu --cpu-max-prime=2000 --events=20000 --time=0 run | grep 'number of events'"),
    PYTHON,
    Workload(
        "redis",
        "redis-server --port 0 --unixsocket /run/redis.sock --save '' --enable-debug-command local --daemonize yes > /dev/null\n"
        "while ! redis-cli -s /run/redis.sock ping > /dev/null 2>&1; do sleep 0.2; done\n"
        "redis-cli -s /run/redis.sock debug populate 200000 key 200",
        "redis-benchmark -s /run/redis.sock -n 20000 -r 200000 -c 8 -t get -q > /dev/null; redis-cli -s /run/redis.sock dbsize",
    ),
    Workload(
        "postgresql",
        "install -d -o postgres /dev/shm/pg /run/pg\n"
        f"su - postgres -c '{_PG}/initdb -D /dev/shm/pg -A trust --no-sync' > /run/pg.log\n"
        f"su - postgres -c '{_PG}/pg_ctl -D /dev/shm/pg -l /run/pg/log -o \"-k /run/pg -c listen_addresses=\" -w -t 120 start' >> /run/pg.log\n"
        "su - postgres -c 'createdb -h /run/pg bench'\n"
        f'echo "create table t as select g as id, md5(g::text) as v from generate_series(1, 100000) g; create index on t (id); analyze t" | {_SQL}',
        f'for n in 1 2 3 4; do echo "select count(*), max(md5(v)), (select v from t where id = $n) from t;"; done | {_SQL}',
    ),
    Workload(
        "jvm",
        _service("Service.java", _JAVA, "java -XX:+UseSerialGC -Xmx256m /run/Service.java"),
        f"{_ASK}; for n in $(seq 40); do ask 4; done | cksum",
    ),
    Workload(
        "compiler",
        "for n in $(seq 25); do echo \"int f$n(int *p, int n) { int s = 0; for (int i = 0; i < n; i++) s += p[i] * $n ^ (s >> 3); return s; }\"; done > /run/many.c\n"
        "gcc -O2 -S -o - /run/many.c | cksum",
        "for n in 1 2 3; do gcc -O2 -S -o - /run/many.c | cksum; done",
    ),
]
