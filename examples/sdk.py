#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Branching, from outside: fork a VM, let every clone try something else, keep the best and fork
that.

    sdk.py VM [CLONES]

Runs on the host, with the Python SDK (`sdk/python`). The VM draws a number. In each round every
clone adds one of its own. The clone with the largest sum is the parent of the next round.
"""

import sys

import vmfork

ROUNDS = 2
STEP = "n=$(cat /tmp/sum); echo $((n + $(od -An -N1 -tu1 /dev/urandom))) | tee /tmp/sum"


def main():
    name = sys.argv[1]
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with vmfork.Client() as client:
        best = client.vm(name)
        best.exec("echo 0 > /tmp/sum", check=True)
        forks = []
        try:
            for turn in range(ROUNDS):
                fork = best.fork(count)
                forks.append(fork)
                sums = {clone: int(clone.exec(STEP, check=True).stdout) for clone in fork}
                best, largest = max(sums.items(), key=lambda item: item[1])
                print(f"round {turn + 1}: {len(sums)} clones, the best is {best.name} with {largest}")
        finally:
            for clone in (clone for fork in forks for clone in fork):
                clone.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
