"""What is visible is what is exported, and the documents agree with the code."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path

import vmfork
from vmfork import _errors

README = Path(__file__).parents[1] / "README.md"


def test_all_is_what_is_visible() -> None:
    visible = {
        name
        for name, value in vars(vmfork).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert visible | {"__version__"} == set(vmfork.__all__)
    assert vmfork.__all__ == sorted(vmfork.__all__, key=lambda name: (name != "VM", name))


def test_the_error_tree_in_the_docstring_is_the_real_one() -> None:
    assert _errors.__doc__ is not None
    drawn = re.findall(r"^    ([ │├└─]*)(\w+)(?:$|  )", _errors.__doc__, re.M)
    parents: list[tuple[int, str]] = []
    for indent, name in drawn:
        depth = len(indent) // 4
        del parents[depth:]
        kind = getattr(vmfork, name)
        if parents:
            assert kind.__bases__ == (getattr(vmfork, parents[-1][1]),), name
        parents.append((depth, name))
    assert {name for _, name in drawn} == set(_errors.__all__)


def test_both_clients_offer_the_same() -> None:
    pairs = [
        (vmfork.Client, vmfork.AsyncClient),
        (vmfork.VM, vmfork.AsyncVM),
        (vmfork.ForkResult, vmfork.AsyncForkResult),
        (vmfork.StartResult, vmfork.AsyncStartResult),
        (vmfork.Snapshots, vmfork.AsyncSnapshots),
        (vmfork.Volumes, vmfork.AsyncVolumes),
    ]
    for blocking, asynchronous in pairs:
        ours, theirs = (
            {name.replace("aclose", "close") for name in dir(kind) if not name.startswith("_")}
            for kind in (blocking, asynchronous)
        )
        assert ours == theirs
        for name in ours - {"close"}:
            one, other = getattr(blocking, name), getattr(asynchronous, name)
            if inspect.isfunction(one):
                assert list(inspect.signature(one).parameters) == list(
                    inspect.signature(other).parameters
                ), name


def test_the_readmes_examples_use_what_exists() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) >= 4
    for block in blocks:
        compile(block, str(README), "exec", flags=0x2000)  # PyCF_ALLOW_TOP_LEVEL_AWAIT
        for name in re.findall(r"vmfork\.(\w+)", block):
            assert name in vmfork.__all__, name
