"""Labels: what goes into requests and filters, and what comes back in models."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import vmfork

from conftest import FakeDaemon


@pytest.fixture
def client(transport: httpx.MockTransport) -> Iterator[vmfork.Client]:
    with vmfork.Client(transport=transport) as client:
        yield client


def test_requests_carry_labels_and_leave_out_none(
    client: vmfork.Client, daemon: FakeDaemon
) -> None:
    vm = client.run("debian", name="web", labels={"app": "web"})
    vm.fork(1, labels={"tier": "2"})
    client.snapshots.create(vm, "warm", labels={"kept": ""})
    client.snapshots.start("warm", labels={"app": "b"})
    sent = [content["labels"] for *_, content in daemon.asked]
    assert sent == [{"app": "web"}, {"tier": "2"}, {"kept": ""}, {"app": "b"}]
    client.run("debian", name="other", labels={})
    assert "labels" not in daemon.asked[-1][3]


def test_lists_are_filtered_by_all_labels_that_are_given(
    client: vmfork.Client, daemon: FakeDaemon
) -> None:
    filters = {"app": "a=b c&d", "tier": None}
    daemon.canned = [(200, {}, b"[]")] * 3
    assert client.vms(ended=True, labels=filters) == []
    assert client.tree(labels=filters) == []
    assert client.snapshots.list(labels=filters) == []
    assert daemon.filters == [["app=a=b c&d", "tier"]] * 3
    assert daemon.asked[0][2]["all"] == "true"


def test_models_have_labels_and_older_daemons_send_none(
    client: vmfork.Client, daemon: FakeDaemon
) -> None:
    daemon.add("web", {}, labels={"app": "web"})
    daemon.add("old", {})
    daemon.keep("warm", labels={"kept": "yes"})
    assert client.vm("web").inspect().labels == {"app": "web"}
    assert client.vm("old").inspect().labels == {}
    assert client.snapshots.get("warm").labels == {"kept": "yes"}
    info = client.vms()[0].info
    assert hash(info) == hash(info), "models stay hashable"


@pytest.mark.parametrize("bad", [["app"], {"app": 1}])
def test_labels_of_another_type_are_a_protocol_error(
    client: vmfork.Client, daemon: FakeDaemon, bad: object
) -> None:
    daemon.add("web", {}, labels=bad)
    with pytest.raises(vmfork.ProtocolError, match="labels"):
        client.vm("web")
