"""Replays what a VM read of an image: `player.py FILE < TRACE`, with lines `US PAGE PAGES`.

The times stand still while a read is waited for, as vmTorrent's do (§4.4). It prints `ready`,
begins once a line says `play`, and prints how many ms it took and how many of them it waited.
"""

import os
import sys
import time

PAGE = 4096

lines = iter(sys.stdin.readline, "play\n")
trace = []
for line in lines:
    trace.append(tuple(map(int, line.split())))
    if len(trace) == 1:
        print("ready", flush=True)
file = os.open(sys.argv[1], os.O_RDONLY)
# What a guest reads ahead is in the trace.
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
begin, waited = time.monotonic(), 0.0
for at_us, page, pages in trace:
    time.sleep(max(0.0, begin + at_us / 1e6 + waited - time.monotonic()))
    asked = time.monotonic()
    if len(os.pread(file, pages * PAGE, page * PAGE)) != pages * PAGE:
        sys.exit(f"page {page}: a read came back short")
    waited += time.monotonic() - asked
print(round((time.monotonic() - begin) * 1e3, 3), round(waited * 1e3, 3))
