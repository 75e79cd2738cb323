#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Sandboxing: fork, run the untrusted part in the clone, keep the answer, drop the clone.

    sandbox.py

One guest of the sandbox answers and wrecks what it can reach, memory and files; another never comes
back. The parent checks that it has the answer and nothing of the wreck.
"""

import os
import sys
import time

from vmfork import sf_clone, sf_exit, sf_kill, sf_recv, sf_request_ticket, sf_send

PRECIOUS = os.environ.get("TMPDIR", "/tmp") + "/vmfork-sandbox-precious"
ANSWERING = "answer = 6 * 7\nsecrets.clear()\nos.unlink(PRECIOUS)"
HANGING = "send('working on it')\nwhile True: time.sleep(1)"

secrets = {"password": "correct horse"}


def in_sandbox(code):
    """Run `code` in a clone; return the first thing it says."""
    ticket = sf_request_ticket(1)
    if sf_clone(ticket) > 0:
        scope = {**globals(), "send": lambda text: sf_send(text.encode()), "answer": None}
        exec(code, scope)  # It is untrusted; that is what the clone is for.
        sf_send(str(scope["answer"]).encode())
        sf_exit()
    _, message = sf_recv(ticket, 1)
    sf_kill(ticket)  # Whether it would ever end by itself is of no interest.
    return message.decode()


def main():
    with open(PRECIOUS, "w", encoding="ascii") as file:
        file.write("precious")
    for code, wanted in ((ANSWERING, "42"), (HANGING, "working on it")):
        said = in_sandbox(code)
        print(f"the sandbox said: {said}")
        if said != wanted:
            return f"the wrong answer: {said}"
    if secrets != {"password": "correct horse"}:
        return "our memory was changed"
    if not os.path.exists(PRECIOUS):
        return "our file is gone"
    os.unlink(PRECIOUS)
    print("our memory and our file are as they were")
    return 0


if __name__ == "__main__":
    sys.exit(main())
