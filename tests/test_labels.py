"""Labels: given to VMs, inherited by all that comes of them, and asked for by lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import vmfork

from harness import guests
from harness.cli import Cli
from harness.cluster import Cluster
from harness.daemon import Daemon
from harness.waits import eventually

MakeDaemon = Callable[..., Daemon]

PROGRAM = Path(__file__).parent / "guest" / "away.py"


@pytest.fixture
def web(client: vmfork.Client, image: str) -> Iterator[vmfork.VM]:
    """A VM from a stored snapshot without labels, with two of its own."""
    guests.warm(client, image, name="seed").remove(force=True)
    (shape,) = [one.name for one in client.snapshots.list() if one.name.startswith("ready-")]
    (vm,) = client.snapshots.start(shape, names=["web"], labels={"app": "web", "tier": "1"}).raise_for_errors()
    yield vm
    for snapshot in client.snapshots.list(labels={"app": None}):
        client.snapshots.remove(snapshot.name, cascade=True)


def labels_of(client: vmfork.Client, name: str) -> dict[str, str]:
    return dict(client.vm(name).inspect().labels)


def names(listed: list[dict[str, Any]]) -> set[str]:
    return {one["name"] for one in listed}


def tree_names(nodes: list[dict[str, Any]]) -> set[str]:
    return {name for node in nodes for name in {node["vm"]["name"], *tree_names(node["children"])}}


def test_clones_of_clones_inherit_and_own_labels_replace(client: vmfork.Client, web: vmfork.VM, cli: Cli) -> None:
    cli("fork", "web", "--name", "one", "--label", "tier=2", "--label", "note=a = b")
    cli("fork", "one", "--name", "two")
    assert labels_of(client, "one") == {"app": "web", "tier": "2", "note": "a = b"}
    assert labels_of(client, "two") == labels_of(client, "one")
    assert labels_of(client, "web") == {"app": "web", "tier": "1"}, "the parent keeps its own"
    text = cli.text("inspect", "one")
    assert "app=web" in text and "tier=2" in text, text


def test_lists_show_what_matches_all_filters(client: vmfork.Client, web: vmfork.VM, cli: Cli) -> None:
    web.fork(1, names=["one"], labels={"tier": "2"}).raise_for_errors()
    web.fork(1, names=["two"]).raise_for_errors()

    def ps(*filters: str) -> set[str]:
        return names(cli.json("ps", *(part for text in filters for part in ("--label", text)))["vms"])

    assert ps("app") == {"web", "one", "two"}
    assert ps("app=web", "tier=1") == {"web", "two"}
    assert ps("tier=2") == {"one"}
    assert ps("tier=3") == ps("app=we") == ps("app", "none") == set()
    assert {vm.name for vm in client.vms(labels={"app": "web", "tier": "2"})} == {"one"}
    # An ancestor is kept, since a tree without it would not be one; other branches are not.
    nodes = cli.json("tree", "--label", "tier=2")["families"]
    assert tree_names(nodes) == {"web", "one"}
    assert cli.json("tree", "--label", "tier=3")["families"] == []


@pytest.mark.slow
@pytest.mark.limit(240)
def test_snapshots_keep_labels_over_a_restart_and_their_vms_inherit(make_daemon: MakeDaemon, image: str) -> None:
    daemon = make_daemon()
    daemon.add_image(image)
    daemon.start()
    cli = Cli(daemon)
    with daemon.client() as client:
        cli("run", image, "--name", "web", "--label", "app=web", "--label", "tier=1")
        assert labels_of(client, "web") == {"app": "web", "tier": "1"}
        cli("snapshot", "create", "web", "warm", "--label", "tier=2", "--label", "kept=", "--wait")
        assert labels_of(client, "web") == {"app": "web", "tier": "1"}, "the VM keeps its own"
    daemon.stop()
    daemon.start()
    kept = {"app": "web", "tier": "2", "kept": ""}
    with daemon.client() as client:
        assert client.snapshots.get("warm").labels == kept
        assert names(cli.json("snapshot", "ls", "--label", "app=web", "--label", "kept")["snapshots"]) == {"warm"}
        assert cli.json("snapshot", "ls", "--label", "tier=1")["snapshots"] == []
        assert "tier=2" in cli.text("snapshot", "inspect", "warm")
        cli("run", "warm", "--name", "plain")
        cli("run", "warm", "--name", "own", "--label", "tier=3")
        assert labels_of(client, "plain") == kept
        assert labels_of(client, "own") == {**kept, "tier": "3"}


@pytest.mark.slow
def test_what_a_guest_forks_inherits(client: vmfork.Client, web: vmfork.VM) -> None:
    web.copy_in(PROGRAM, "/run/away.py")
    web.exec("COUNT=2 python3 /run/away.py lost > /run/said 2>&1 < /dev/null &", check=True)
    eventually(lambda: b"cloned" in web.read_file("/run/said"), 60, "the ticket is cloned")
    clones = [vm for vm in client.vms(labels={"app": "web"}) if vm.name != "web"]
    assert len(clones) == 2
    for clone in clones:
        assert clone.inspect().labels == {"app": "web", "tier": "1"}
        clone.write_file("/run/go", "")
    eventually(lambda: len(web.read_file("/run/said").splitlines()) >= 3, 60, "the ticket has ended")


@pytest.mark.limit(240)
def test_clones_on_other_hosts_inherit_and_lists_of_any_host_find_them(three_hosts: Cluster) -> None:
    cluster = three_hosts
    seed = cluster.warm(0, name="seed", memory_mib=256)
    try:
        (web,) = seed.fork(1, names=["web"], place="here", labels={"app": "web", "tier": "1"}).raise_for_errors()
        web.fork(1, names=["one"], hosts=["h1"], labels={"tier": "2"}).raise_for_errors()
        there = cluster.clients[1]
        assert there.vm("one").inspect().host == "h1"
        assert labels_of(there, "one") == {"app": "web", "tier": "2"}
        # From there to a third host, and asked of a host that has none of them.
        there.vm("one").fork(1, names=["two"], hosts=["h2"]).raise_for_errors()
        for client in cluster.clients:
            assert labels_of(client, "two") == {"app": "web", "tier": "2"}
            assert {vm.name for vm in client.vms(labels={"app": "web", "tier": "2"})} == {"one", "two"}
        nodes = cluster.clis[2].json("tree", "--label", "tier=2")["families"]
        assert tree_names(nodes) == {"seed", "web", "one", "two"}
    finally:
        cluster.clear()


@pytest.mark.parametrize(
    ("label", "why"),
    [("app", "KEY=VALUE"), ("_a=x", "starting with"), ("a=x\ny", "control"), (f"{'k' * 64}=x", "63"), ("a=" + "x" * 256, "255")],
)
def test_the_command_refuses_what_is_no_label_and_says_why(cli: Cli, web: vmfork.VM, label: str, why: str) -> None:
    done = cli("fork", "web", "--label", label, code=2)
    assert why in done.stderr.decode(), done.stderr
    again = cli("fork", "web", "--label", "a=1", "--label", "a=1", code=2)
    assert b"twice" in again.stderr


@pytest.mark.parametrize(
    "body",
    ['{"labels":{"a":"1","a":"2"}}', '{"labels":{"a":1}}', '{"labels":{"":"x"}}', '{"labels":["a=1"]}', '{"count":1.0,"labels":{"a":"1","a":"2"}}'],
)
def test_rest_refuses_labels_that_are_none(daemon: Daemon, web: vmfork.VM, client: vmfork.Client, body: str) -> None:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(daemon.socket)), base_url="http://d", timeout=60) as http:
        answer = http.post("/v1/vms/web/fork", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert http.get("/v1/vms", params={"label": "=x"}).status_code == 400
    assert web.inspect().clones == 0


def test_a_vm_has_at_most_64_with_what_it_inherits(client: vmfork.Client, web: vmfork.VM) -> None:
    more = {f"k{number}": "x" for number in range(62)}
    (full,) = web.fork(1, names=["full"], labels=more).raise_for_errors()
    assert len(full.inspect().labels) == 64
    full.fork(1, labels={"k0": "y"}).raise_for_errors()
    with pytest.raises(vmfork.BadRequest, match="64"):
        full.fork(1, labels={"another": "x"})
    with pytest.raises(vmfork.BadRequest, match="64"):
        client.snapshots.create("full", "never", labels={"another": "x"})
    assert full.inspect().clones == 1
