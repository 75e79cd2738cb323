"""The same end by copying: a VM is suspended, all of its state copied to other hosts, and resumed
there.

With plain QEMU, whose processes wait already, as those of the pool do. The state goes over the same
links in two ways. *To each*: to each host by itself, as from an NFS server. *Once*: to one host,
and all others are taken to have it by then, as with the best multicast. Each then runs a command
and answers, as clones do.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from .. import world as w
from ..cluster import FORMS, Cluster, cluster, inside, rest
from ..rawqemu import RawVm, State, Target, save

TITLE = "Clones on other hosts, against suspend, copy, resume"

#: Of the rounds of a run: each takes half a minute.
SHARE = 0.1

PORT = 7901
PIECE = 1 << 20


def run(world: w.World) -> None:
    for form in FORMS:
        _by(world, form)


def _by(world: w.World, form: str) -> None:
    hosts, memory_mib = world.pick(((8, 1024),), ((2, 256),))[0]
    with cluster(world, hosts + 1, pool=1, more_flags=["--page-transfer", form]) as made:
        load = f"yes vmfork | head -c {memory_mib // 4}M > /dev/shm/loaded"

        def loaded(name: str) -> w.vmfork.VM:
            vm = world.run(made.clients[0], memory_mib=memory_mib, name=name)
            vm.exec(load, check=True, timeout_s=120)
            return vm

        vm = loaded("parent")
        w.end_all(vm.fork(hosts, hosts=made.names(hosts)))  # pools learn the shape
        for _ in world.rounds(f"{hosts} hosts, {memory_mib} MiB, by {form}", share=SHARE):
            fresh = loaded("fresh")
            _fork(world, made, fresh, hosts, f"first fork, by {form}")
            fresh.remove(force=True)
            # What clones of earlier ones waited for goes along with these.
            _fork(world, made, vm, hosts, f"later fork, by {form}")
        if form != FORMS[0]:
            return
        with RawVm.boot(world.image, memory_mib=memory_mib) as source:
            source.exec(load)
            for _ in world.rounds(f"{hosts} hosts, {memory_mib} MiB, copied", share=SHARE):
                for how, copies in (("to each", hosts), ("once", 1)):
                    _copy(world, made, source, how, copies, hosts)


def _add(world: w.World, how: str, took_ms: float, sent_bytes: int) -> None:
    world.figures.series("copying_answered_ms", how=how).add(took_ms)
    world.figures.series("copying_sent_MiB", how=how).add(sent_bytes / (1 << 20))


def _fork(world: w.World, made: Cluster, vm: w.vmfork.VM, hosts: int, how: str) -> None:
    rest(world, made, vm, empty=True)
    sent, begin = made.all_sent_bytes(), w.now_ms()
    fork = vm.fork(hosts, hosts=made.names(hosts)).raise_for_errors()
    w.answer_all(fork)
    _add(world, how, w.now_ms() - begin, made.all_sent_bytes() - sent)
    w.end_all(fork)


def _copy(world: w.World, made: Cluster, source: RawVm, how: str, copies: int, hosts: int) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(hosts) as threads:
        targets = [stack.enter_context(Target(source)) for _ in range(hosts)]
        sent, begin = made.all_sent_bytes(), w.now_ms()
        state = save(source)
        stack.callback(state.close)
        saved_ms = w.now_ms() - begin
        copied = _send(made, state, range(1, copies + 1))
        for each in copied:
            stack.callback(each.close)
        copied_ms = w.now_ms() - begin - saved_ms

        def resume(number: int) -> None:
            targets[number].load(copied[number % copies])
            targets[number].vm.exec("true")

        list(threads.map(resume, range(hosts)))
        took = w.now_ms() - begin
        _add(world, how, took, made.all_sent_bytes() - sent)
    for step, ms in (("save", saved_ms), ("copy", copied_ms), ("resume", took - saved_ms - copied_ms)):
        world.figures.series("copying_step_ms", how=how, step=step).add(ms)


def _send(made: Cluster, state: State, numbers: Iterable[int]) -> list[State]:
    """Copy a state to these hosts, at the same time."""
    size = os.fstat(state.fd).st_size

    def one(number: int) -> State:
        address = (made.net.addresses[number], PORT)
        copy = State()
        with inside(made.net, number, lambda: socket.create_server(address)) as listener:
            with inside(made.net, 0, lambda: socket.create_connection(address, 30)) as out, listener.accept()[0] as there:
                out.settimeout(None)
                with ThreadPoolExecutor(1) as receiver:
                    received = receiver.submit(_receive, there, copy.fd)
                    offset = 0
                    while offset < size:
                        offset += os.sendfile(out.fileno(), state.fd, offset, size - offset)
                    out.shutdown(socket.SHUT_WR)
                    if received.result(300) != size:
                        raise RuntimeError("a part of the state was lost")
        return copy

    numbers = list(numbers)
    with ThreadPoolExecutor(len(numbers)) as threads:
        return list(threads.map(one, numbers))


def _receive(connection: socket.socket, fd: int) -> int:
    buffer, total = bytearray(PIECE), 0
    while count := connection.recv_into(buffer):
        os.write(fd, memoryview(buffer)[:count])
        total += count
    return total
