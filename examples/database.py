#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A database on a disk, forked in the middle of a transaction: each clone commits something else.

    database.py [ROWS] [--image IMAGE]

Runs on the host, with the Python SDK (`sdk/python`). It boots a VM with an empty disk at /data, and
starts database_guest.py there: SQLite, with a transaction that is open. Then it forks the VM into
one clone for each statement. Each clone adds its statement to the transaction and commits. The
parent rolls back. All of them check their database, unmount the disk and check the file system.

The same statements run in a database in this program's memory. The exit code is 0 if all answers
are the same, and all checks found nothing.
"""

import argparse
import json
import sqlite3
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import vmfork
from database_guest import INTEREST, TABLE

DISK_BYTES = 1 << 30
GUEST_PROGRAM = Path(__file__).with_name("database_guest.py")
STATEMENTS = (
    "update accounts set balance = balance * 2",
    "update accounts set balance = 0 where id % 3 = 0",
    "delete from accounts where balance > 500",
)
ROLL_BACK = ""

MOUNT = "mkdir -p /data && mount /dev/vdb /data"
# Until it waits for a statement; if it ends before that, with what it printed.
START = """python3 /run/database_guest.py {rows} > /run/database.log 2>&1 < /dev/null &
while [ ! -p /run/statement ]; do
    kill -0 $! || { cat /run/database.log >&2; exit 1; }
    sleep 0.05
done"""
ANSWER = "cat > /run/statement && cat /run/answer"
# Reads the device, and changes nothing. Without -f a clean file system would not be looked at.
CHECK = "umount /data && e2fsck -fn /dev/vdb"


def main():
    parser = argparse.ArgumentParser(description="Fork a VM with a database on its disk.")
    parser.add_argument("rows", type=int, nargs="?", default=20_000)
    parser.add_argument("--image", default="default")
    options = parser.parse_args()
    with vmfork.Client() as client:
        disk = vmfork.NewDisk.blank("data", DISK_BYTES)
        with client.run(options.image, name="ledger", disks=[disk]) as parent:
            load(parent, options.rows)
            with parent.fork(len(STATEMENTS)) as clones:
                clones.raise_for_errors()
                (data,) = parent.inspect().disks
                print(f"forked `{parent.name}` into {len(clones)} in the middle of a transaction:")
                print(f"paused {clones.pause_ms:.1f} ms, of it {clones.stages.disks_ms:.2f} ms for the disk")
                # The clones first: what they commit must not reach the parent.
                all_right = decide(clones, STATEMENTS, options.rows)
                all_right &= decide([parent], [ROLL_BACK], options.rows)
                written = sum(clone.inspect().disks[0].written_bytes for clone in clones)
                print(f"the clones wrote {written / 1e6:.1f} MB, to disks of {data.size_bytes / 1e6:,.0f} MB each")
    return 0 if all_right else 1


def load(vm, rows):
    vm.copy_in(GUEST_PROGRAM, "/run/database_guest.py")
    vm.exec(MOUNT, check=True)
    vm.exec(START.replace("{rows}", str(rows)), check=True)


def decide(vms, statements, rows):
    """Let each VM's program end its transaction. → whether every answer is right."""
    with ThreadPoolExecutor(len(vms)) as threads:
        answers = list(threads.map(ended, vms, statements))
    outcomes = [right(*answer, rows) for answer in zip(vms, statements, *zip(*answers))]
    return all(outcomes)


def ended(vm, statement):
    """What the database holds in the end, and what is wrong with the file system, if anything."""
    answer = json.loads(vm.exec(ANSWER, stdin=f"{statement}\n".encode(), check=True).stdout)
    checked = vm.exec(CHECK)
    return answer, "" if checked.exit_code == 0 else checked.stdout_text + checked.stderr_text


def right(vm, statement, answer, broken, rows):
    file_system = f"file system broken:\n{broken}" if broken else "file system clean"
    found = f"{answer['rows']:,} rows, total {answer['total']:,}, database {answer['integrity']}"
    print(f"{vm.name:10}{statement or 'rolled back'}\n{'':10}{found}, {file_system}")
    wanted = expected(statement, rows)
    if (answer["rows"], answer["total"]) != wanted:
        print(f"{'':10}wrong: {wanted[0]:,} rows and a total of {wanted[1]:,} were expected")
        return False
    return answer["integrity"] == "ok" and not broken


def expected(statement, rows):
    """Rows and total, by a database that no VM has."""
    with sqlite3.connect(":memory:") as ledger:
        ledger.execute(TABLE)
        ledger.executemany("insert into accounts values (?, ?)", ((n, n % 1000) for n in range(rows)))
        if statement:
            ledger.execute(INTEREST)
            ledger.execute(statement)
        return ledger.execute("select count(*), sum(balance) from accounts").fetchone()


if __name__ == "__main__":
    sys.exit(main())
