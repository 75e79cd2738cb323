#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The program in the VM of database.py: a ledger in SQLite, on the disk that is mounted at /data.

    database_guest.py ROWS

It loads the ledger, begins a transaction and leaves it open. Then it waits for a statement in the
FIFO /run/statement. With a statement it continues the transaction and commits it, with an empty
line it rolls back. It writes what the ledger holds then to the FIFO /run/answer.
"""

import json
import os
import sqlite3
import sys

LEDGER = "/data/ledger.db"
TABLE = "create table accounts (id integer primary key, balance integer)"
INTEREST = "update accounts set balance = balance + 1"


def main():
    rows = int(sys.argv[1])
    ledger = sqlite3.connect(LEDGER, isolation_level=None)
    ledger.execute("pragma journal_mode = wal")
    ledger.execute("begin")
    ledger.execute(TABLE)
    ledger.executemany("insert into accounts values (?, ?)", ((n, n % 1000) for n in range(rows)))
    ledger.execute("commit")

    ledger.execute("begin")
    ledger.execute(INTEREST)
    os.mkfifo("/run/answer")
    os.mkfifo("/run/statement")
    with open("/run/statement", encoding="utf-8") as file:
        statement = file.read().strip()  # The fork happens while this waits.

    if statement:
        ledger.execute(statement)
    ledger.execute("commit" if statement else "rollback")
    count, total = ledger.execute("select count(*), sum(balance) from accounts").fetchone()
    (integrity,) = ledger.execute("pragma integrity_check").fetchone()
    ledger.close()
    with open("/run/answer", "w", encoding="utf-8") as file:
        json.dump({"rows": count, "total": total, "integrity": integrity}, file)


if __name__ == "__main__":
    main()
