"""The blocking client, against the fake daemon behind httpx's transport seam."""

from __future__ import annotations

import pickle
from pathlib import Path

import httpx
import pytest
import vmfork
from conftest import FakeDaemon, error, reply


@pytest.fixture()
def client(transport: httpx.MockTransport) -> vmfork.Client:
    return vmfork.Client(transport=transport)


def test_run_asks_only_for_what_was_given(client: vmfork.Client, daemon: FakeDaemon) -> None:
    vm = client.run("debian", name="web", memory_mib=256)
    assert (vm.name, vm.vmid, vm.id) == ("web", 0, "0" * 16)
    assert vm.info is not None
    assert vm.info.state is vmfork.VmState.RUNNING
    assert daemon.asked == [
        (
            "POST",
            "/v1/vms",
            {},
            {"image": "debian", "name": "web", "memory_mib": 256, "boot_timeout_ms": 120000},
        )
    ]


def test_labels_go_out_come_back_and_filter(client: vmfork.Client, daemon: FakeDaemon) -> None:
    vm = client.run("debian", name="web", labels={"app": "web"})
    assert daemon.asked[-1][3]["labels"] == {"app": "web"}
    assert vm.info is not None
    assert vm.info.labels == {"app": "web"}
    vm.fork(1, labels={"tier": "2"})
    assert daemon.asked[-1][3]["labels"] == {"tier": "2"}
    client.vms(labels={"app": "web", "tier": None})
    assert daemon.labels == ["app=web", "tier"]
    client.tree(labels={"app": None})
    assert daemon.labels == ["app"]
    client.snapshots.list(labels={"app": "a=b"})
    assert daemon.labels == ["app=a=b"]
    assert client.run("debian").info.labels == {}  # type: ignore[union-attr]


def test_exec_passes_everything_and_decodes_the_output(
    client: vmfork.Client, daemon: FakeDaemon
) -> None:
    vm = client.run("debian", name="web")
    result = vm.exec(
        ["tr", "a", "b"], stdin="aé", env={"X": "1"}, cwd="/tmp", user="nobody", timeout_s=2
    )
    assert result.ok
    assert result.stdout == "aé".encode()
    assert daemon.asked[-1][3] == {
        "argv": ["tr", "a", "b"],
        "env": {"X": "1"},
        "cwd": "/tmp",
        "user": "nobody",
        "stdin_base64": "YcOp",
        "timeout_ms": 2000,
    }


def test_a_string_goes_to_the_guests_shell(client: vmfork.Client) -> None:
    assert client.run("debian").exec("a | b").stdout_text == "/bin/sh -c a | b"


def test_check_turns_a_failed_command_into_an_exception(client: vmfork.Client) -> None:
    vm = client.run("debian", name="web")
    assert vm.exec(["false"]).exit_code == 3
    with pytest.raises(vmfork.ExecFailed) as info:
        vm.exec(["false"], check=True)
    assert str(info.value) == "'false' in `web` ended with exit code 3: why"
    assert info.value.result.exit_code == 3
    assert info.value.vm == "web"


def test_a_fork_is_a_sequence_of_clones_and_an_error_for_each_other(
    client: vmfork.Client, daemon: FakeDaemon
) -> None:
    daemon.room = 2
    fork = client.run("debian", name="web").fork(3)
    assert [clone.name for clone in fork] == ["web.1", "web.2"]
    assert len(fork) == 2
    assert fork[1].vmid == 2
    assert (fork.requested, fork.granted, fork.pause_ms, fork.total_ms) == (3, 2, 3.4, 31.0)
    assert fork.stages.stop_ms == 0.5
    (failure,) = fork.errors
    assert isinstance(failure, vmfork.NoCapacity)
    assert failure.vm == "web.3"
    assert str(failure) == "start `web.3`: 1 MiB left"
    with pytest.raises(vmfork.NoCapacity):
        fork.raise_for_errors()


def test_all_or_nothing_raises(client: vmfork.Client, daemon: FakeDaemon) -> None:
    daemon.room = 2
    with pytest.raises(vmfork.NoCapacity):
        client.run("debian", name="web").fork(3, all_or_nothing=True)
    assert [vm.name for vm in client.vms()] == ["web"]


def test_with_blocks_kill_at_the_end(client: vmfork.Client) -> None:
    with client.run("debian", name="web") as vm:
        with vm.fork(2) as clones:
            clones[0].kill()  # one that has ended already is no trouble
        assert [other.name for other in client.vms()] == ["web"]
    assert client.vms() == []
    assert len(client.vms(ended=True)) == 3


def test_clean_up_does_not_hide_the_error_that_ended_the_block(
    client: vmfork.Client, daemon: FakeDaemon
) -> None:
    with pytest.raises(KeyError) as info, client.run("debian", name="web"):
        daemon.canned = [error(502, "qemu", "kill `web`")]
        raise KeyError("mine")
    assert info.value.__notes__ == ["while ending VMs: kill `web`"]


def test_inspect_tells_a_clone_its_id(client: vmfork.Client, daemon: FakeDaemon) -> None:
    (clone,) = client.run("debian", name="web").fork(1)
    assert (clone.id, clone.info) == (None, None)
    detail = clone.inspect()
    assert clone.id == detail.id
    assert detail.memory.faults == vmfork.FaultCounts(fetch=1)
    assert detail.parent == "web"
    clone.remove(force=True)
    assert daemon.asked[-1][:3] == ("DELETE", f"/v1/vms/{detail.id}", {"force": "true"})


def test_inspect_tells_the_last_fork(client: vmfork.Client) -> None:
    vm = client.run("debian", name="web")
    assert vm.inspect().last_fork is None
    vm.fork(2)
    fork = vm.inspect().last_fork
    assert fork is not None
    assert (fork.pause_ms, fork.began_unix_ms) == (3.4, 1_700_000_000_000)
    assert [clone.ready_ms for clone in fork.clones] == [21.0, 21.0]


def test_files_go_both_ways(client: vmfork.Client, daemon: FakeDaemon, tmp_path: Path) -> None:
    vm = client.run("debian", name="web")
    vm.write_file("/a b?&", "text", mode=0o600)
    assert daemon.files == {"/a b?&": (0o600, b"text")}
    assert vm.read_file("/a b?&") == b"text"
    local = tmp_path / "in"
    local.write_bytes(bytes(range(256)) * 4096)
    local.chmod(0o750)
    vm.copy_in(local, "/data")
    assert daemon.files["/data"] == (0o750, local.read_bytes())
    assert vm.copy_out("/data", tmp_path / "out") == 1 << 20
    assert (tmp_path / "out").read_bytes() == local.read_bytes()
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


def test_a_copy_that_fails_leaves_the_old_file_and_no_litter(
    client: vmfork.Client, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    target.write_text("old")
    vm = client.run("debian", name="web")
    with pytest.raises(vmfork.NotFound):
        vm.copy_out("/nope", target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_logs(client: vmfork.Client, daemon: FakeDaemon) -> None:
    vm = client.run("debian", name="web")
    assert vm.logs() == "boot\nlögin\n"
    assert "".join(vm.follow_logs()) == "boot\nlögin\n"
    assert daemon.asked[-1][2] == {"follow": "true"}


ERROR_CLASSES = {
    "bad_request": vmfork.BadRequest,
    "unauthorized": vmfork.Unauthorized,
    "not_found": vmfork.NotFound,
    "conflict": vmfork.Conflict,
    "no_capacity": vmfork.NoCapacity,
    "guest": vmfork.GuestError,
    "qemu": vmfork.QemuError,
    "host": vmfork.HostError,
    "page_lost": vmfork.PageLost,
    "timeout": vmfork.TimeoutExceeded,
    "internal": vmfork.InternalError,
    "a_code_from_the_future": vmfork.ApiError,
}


@pytest.mark.parametrize(("code", "kind"), ERROR_CLASSES.items())
def test_every_code_has_its_class(
    client: vmfork.Client, daemon: FakeDaemon, code: str, kind: type[vmfork.ApiError]
) -> None:
    daemon.canned = [error(500, code, "fork `web`", cause="because", remedy="do this")]
    with pytest.raises(vmfork.ApiError) as info:
        client.vm("web")
    failure = info.value
    assert type(failure) is kind
    assert (failure.code, failure.message, failure.cause, failure.remedy, failure.vm) == (
        code, "fork `web`", "because", "do this", "web",
    )
    assert str(failure) == "fork `web`: because (hint: do this)"
    again = pickle.loads(pickle.dumps(failure))
    assert (type(again), str(again), again.code) == (kind, str(failure), code)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((200, {}, b"<html>"), "Version is not JSON"),
        (reply(200, {"api": "v1"}), "Version.vmforkd is missing"),
        (reply(200, {"api": 1, "vmforkd": "x"}), "Version.api should be of type str, but is 1"),
        (reply(200, []), "Version should be an object, but is []"),
        ((502, {}, b"bad gateway"), "version: HTTP 502 without an error document: 'bad gateway'"),
    ],
)
def test_what_is_not_vmfork_is_told_so(
    client: vmfork.Client, daemon: FakeDaemon, answer: tuple[int, dict[str, str], bytes], text: str
) -> None:
    daemon.canned = [answer]
    with pytest.raises(vmfork.ProtocolError) as info:
        client.version()
    assert text in str(info.value)


def test_words_of_a_newer_daemon_become_unknown(client: vmfork.Client, daemon: FakeDaemon) -> None:
    daemon.add("web", {}, state="levitating", accel="warp")
    (vm,) = (vm for vm in client.vms(ended=True))
    assert vm.info is not None
    assert vm.info.state is vmfork.VmState.UNKNOWN
    assert vm.info.accel is vmfork.Accel.UNKNOWN


def test_images_are_pushed_and_pulled(client: vmfork.Client, daemon: FakeDaemon) -> None:
    image = {"name": "debian", "size_bytes": 5, "created_unix_ms": 1, "remote": "s3://a/b"}
    pushed = {"schema": "vmfork/1", "names": ["debian"], "sent_bytes": 3, "total_ms": 1.5}
    daemon.canned = [reply(200, pushed), reply(200, image)]
    assert client.push_image("debian", "s3://a/b").names == ("debian",)
    assert daemon.asked[-1][3] == {"location": "s3://a/b"}
    assert client.pull_image("debian", "s3://a/b", wait=True).remote == "s3://a/b"
    assert daemon.asked[-1][3] == {"location": "s3://a/b", "wait": True}
    with pytest.raises(vmfork.BadRequest):
        client.pull_image("", "s3://a/b")


def test_lists_trees_and_the_host(client: vmfork.Client, daemon: FakeDaemon) -> None:
    vm = daemon.add("web", {})
    daemon.canned = [
        reply(200, [{"vm": vm, "children": [{"vm": {**vm, "vmid": 1}, "children": []}]}]),
        reply(200, [{"name": "debian", "size_bytes": 5, "created_unix_ms": 1, "agent": True}]),
        reply(200, {
            "memory_total_bytes": 3, "memory_available_bytes": 2, "memory_admissible_bytes": 1,
            "vcpus_max": 128, "vcpus_admissible": 127,
            "cpus": 2, "accel_default": "tcg", "accel_reason": "kvm_pvm",
            "pool": {"target": 4, "waiting": 3, "hits": 2, "misses": 1},
            "lost": [{"name": "old", "id": "1", "image": "debian", "parent": None}],
        }),
        reply(200, {"checks": [{"name": "qemu", "status": "failed", "remedy": "apt"}]}),
        reply(200, {"vmforkd": "0.1.0", "api": "v1", "qemu": None, "kernel": "6.18"}),
    ]
    assert client.tree()[0].children[0].vm.vmid == 1
    assert client.images()[0].name == "debian"
    host = client.host()
    assert (host.pool.waiting, host.lost[0].name) == (3, "old")
    assert not client.doctor().ok
    assert client.version().qemu is None


def test_names_that_would_be_another_route_are_refused(
    client: vmfork.Client, daemon: FakeDaemon
) -> None:
    for name in ("", ".", ".."):
        with pytest.raises(vmfork.BadRequest):
            client.vm(name)
    with pytest.raises(vmfork.NotFound):
        client.vm("a/../kill")
    assert len(daemon.asked) == 1


def test_models_are_frozen_and_slotted() -> None:
    result = vmfork.ExecResult(exit_code=0)
    with pytest.raises(AttributeError):
        result.exit_code = 1  # type: ignore[misc]
    assert not hasattr(result, "__dict__")


def test_hosts_that_do_not_answer_are_warned_of(
    client: vmfork.Client, daemon: FakeDaemon
) -> None:
    daemon.canned = [(200, {"x-vmfork-missing-hosts": "h2,h3"}, b"[]")]
    with pytest.warns(vmfork.HostsMissing, match="no answer from h2, h3") as caught:
        assert client.vms() == []
    assert isinstance(caught[0].message, vmfork.HostsMissing)
    assert caught[0].message.hosts == ("h2", "h3")
    assert caught[0].filename == __file__


def test_disks_go_out_and_come_back(client: vmfork.Client, daemon: FakeDaemon) -> None:
    data = vmfork.NewDisk.blank("data", 1 << 30)
    base = vmfork.NewDisk.image("base", "default")
    vm = client.run("debian", name="web", disks=[data, base])
    assert daemon.asked[-1][3]["disks"] == [
        {"name": "data", "source": {"type": "blank", "size_bytes": 1 << 30}},
        {"name": "base", "source": {"type": "image", "image": "default"}},
    ]
    (disk,) = vm.inspect().disks
    assert (disk.name, disk.device) == ("data", "/dev/vdb")
    device = vmfork.RootDevice.BLOCK
    root = vmfork.Root.OVERLAY
    client.run("debian", name="big", root=root, root_bytes=1 << 36, root_device=device)
    asked = daemon.asked[-1][3]
    assert (asked["root"], asked["root_bytes"]) == ("overlay", 1 << 36)
    assert asked["root_device"] == "block"
    client.run("debian", name="bare")
    assert not {"disks", "root", "root_bytes", "root_device"} & set(daemon.asked[-1][3])


def test_disks_of_a_host_are_listed_exported_resized_and_removed(
    client: vmfork.Client, daemon: FakeDaemon, tmp_path: Path
) -> None:
    disk = {
        "id": "d15c", "name": "data", "vm": "db", "state": "left",
        "size_bytes": 1 << 20, "written_bytes": 4096,
    }
    content = b"x" * 4096 + bytes((1 << 20) - 4096)
    daemon.canned = [
        reply(200, [disk]),
        reply(200, disk | {"state": "damaged", "reason": "its note"}),
        (200, {"content-type": "application/octet-stream"}, content),
        reply(200, disk | {"size_bytes": 1 << 21}),
        reply(204, None),
    ]
    assert client.disks()[0].state is vmfork.DiskState.LEFT
    assert client.inspect_disk("d15c").reason == "its note"
    file = tmp_path / "disk.img"
    assert client.export_disk("d15c", file) == 1 << 20
    assert file.read_bytes() == content
    assert file.stat().st_mode & 0o777 == 0o600
    assert client.resize_disk("d15c", 1 << 21).size_bytes == 1 << 21
    assert daemon.asked[-1][3] == {"size_bytes": 1 << 21}
    client.remove_disk("d15c")
    paths = [(method, path) for method, path, _, _ in daemon.asked]
    assert paths == [
        ("GET", "/v1/disks"),
        ("GET", "/v1/disks/d15c"),
        ("GET", "/v1/disks/d15c/content"),
        ("POST", "/v1/disks/d15c/resize"),
        ("DELETE", "/v1/disks/d15c"),
    ]
