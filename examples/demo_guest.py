#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The guest's side of the demonstration: align reads to a genome, alone and on forked workers.

    demo_guest.py WORKERS READS FOLDER

Loads the genome's index and the reads into memory, aligns all reads here, then forks this very VM.
Each clone finds index and reads in its memory, aligns its share and sends its SAM records back.
Both answers are written to FOLDER, `alone.sam` and `merged.sam`. What goes on is told on standard
output, a JSON object a line, which demo.py on the host shows.

The aligner is Bowtie 2, the data is that of Debian's package bowtie2-examples.
"""

import gzip
import json
import os
import subprocess
import sys
import threading
import time

from vmfork import sf_clone, sf_exit, sf_join, sf_kill, sf_messages, sf_request_ticket, sf_send

EXAMPLES = "/usr/share/doc/bowtie2/examples"
INDEX = "lambda_virus"
READS = "reads/reads_1.fq.gz"
LINES_PER_READ = 4  # of a FASTQ file


def tell(event, **facts):
    print(json.dumps({"event": event, **facts}), flush=True)


def read_example(path):
    """A file of the package; Debian has compressed the larger ones."""
    with open(path, "rb") as file:
        content = file.read()
    return gzip.decompress(content) if path.endswith(".gz") else content


def load_index(folder):
    """Unpack the index into guest memory (FOLDER is in a tmpfs); return its bytes."""
    total = 0
    for name in sorted(os.listdir(f"{EXAMPLES}/index")):
        if name.startswith(f"{INDEX}."):
            content = read_example(f"{EXAMPLES}/index/{name}")
            total += len(content)
            with open(f"{folder}/{name.removesuffix('.gz')}", "wb") as file:
                file.write(content)
    return total


def load_reads(count):
    """The first COUNT reads, each as its lines of FASTQ."""
    lines = read_example(f"{EXAMPLES}/{READS}").splitlines(keepends=True)
    lines = lines[: count * LINES_PER_READ]
    return [
        b"".join(lines[i : i + LINES_PER_READ]) for i in range(0, len(lines), LINES_PER_READ)
    ]


def align(folder, reads, progress=None):
    """The aligner's SAM text for READS, in their order.

    It maps the index from the tmpfs (--mm): no copy is made, and clones share its pages.
    """
    command = ["bowtie2-align-s", "--wrapper", "basic-0", "--mm", "-x", f"{folder}/{INDEX}"]
    aligner = subprocess.Popen(
        [*command, "-q", "-U", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    said = []
    # Three pipes, and each of them can fill: one thread for each of the other two.
    feeder = threading.Thread(target=feed, args=(aligner.stdin, reads))
    listener = threading.Thread(target=lambda: said.append(aligner.stderr.read()))
    feeder.start()
    listener.start()
    sam = []
    for line in aligner.stdout:
        sam.append(line)
        if progress:
            progress(len(sam))
    feeder.join()
    listener.join()
    if aligner.wait() != 0:
        raise RuntimeError(f"the aligner failed: {b''.join(said).decode(errors='replace').strip()}")
    return b"".join(sam)


def feed(pipe, reads):
    try:
        with pipe:
            for read in reads:
                pipe.write(read)
    except BrokenPipeError:
        pass  # It has ended; its exit code says why.


def split(sam):
    """Header and records. The header's @PG line quotes the command and would differ by nothing
    else."""
    lines = sam.splitlines(keepends=True)
    header = [line for line in lines if line.startswith(b"@") and not line.startswith(b"@PG")]
    return b"".join(header), [line for line in lines if not line.startswith(b"@")]


def shown_each_second(event, of):
    last = time.monotonic()

    def progress(done):
        nonlocal last
        if time.monotonic() - last >= 1:
            last = time.monotonic()
            tell(event, done=min(done, of), of=of)

    return progress


def work(folder, reads, vmid, workers):
    """A clone's whole life after the fork: it has index and reads in its memory already."""
    sf_send(b"running")
    first, last = (len(reads) * part // workers for part in (vmid - 1, vmid))
    sam = align(folder, reads[first:last])
    sf_send(json.dumps({"reads": last - first}).encode() + b"\n" + sam)


def on_workers(folder, reads, wanted):
    """The same answer as `align`, from clones: header and records in the order of the reads."""
    ticket = sf_request_ticket(wanted)
    tell("ticket", wanted=wanted, granted=ticket.granted)
    vmid = sf_clone(ticket)
    if vmid > 0:
        try:
            work(folder, reads, vmid, ticket.granted)
        except Exception as error:
            sf_send(json.dumps({"error": str(error)}).encode())
        finally:
            sf_exit()  # Whatever happened: what follows is the parent's.
    tell("forked")
    parts = {}
    try:
        for sender, message in sf_messages(ticket):
            if message == b"running":
                tell("running", vmid=sender)
                continue
            first_line, _, sam = message.partition(b"\n")
            facts = json.loads(first_line)
            if "error" in facts:
                raise RuntimeError(f"worker {sender}: {facts['error']}")
            parts[sender] = split(sam)
            tell("answer", vmid=sender, bytes=len(sam), **facts)
    except BaseException:
        sf_kill(ticket)
        raise
    for worker in sf_join(ticket):
        tell("ended", vmid=worker.vmid, error=worker.error)
        if worker.error or worker.vmid not in parts:
            raise RuntimeError(f"worker {worker.vmid} gave no answer: {worker.error}")
    records = [record for vmid in sorted(parts) for record in parts[vmid][1]]
    return parts[1][0], records


def write(path, header, records):
    with open(path, "wb") as file:
        file.write(header)
        file.writelines(records)


def main():
    workers, count, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.makedirs(folder, exist_ok=True)
    tell("loading")
    index_bytes = load_index(folder)
    reads = load_reads(count)
    tell("loaded", index_bytes=index_bytes, reads=len(reads), read_bytes=sum(map(len, reads)))

    header, records = split(align(folder, reads, shown_each_second("aligned", len(reads))))
    tell("alone", records=len(records))
    write(f"{folder}/alone.sam", header, records)

    tell("forking")
    header, records = on_workers(folder, reads, workers)
    tell("merged", records=len(records))
    write(f"{folder}/merged.sam", header, records)
    tell("written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
