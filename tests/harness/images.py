"""Guest images: built once, kept in a store that all tests share, linked into each daemon's."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

from . import places

#: The default guest image's name.
DEFAULT = os.environ.get("VMFORK_TEST_IMAGE", "default")

#: The image of programs that test disks and file systems.
PROGRAMS = "programs"

BUILD_S = 1200.0


def build_command(name: str) -> list[str]:
    """How an image is built, in one place. It has nothing to do where nothing has changed."""
    own = places.ROOT / "tests" / "guest" / f"{name}.json"
    spec = own if own.exists() else places.OUT / "lib" / "vmfork" / "images" / f"{name}.json"
    return ["image", "build", name, "--spec", str(spec)]


def store() -> Path:
    """The folder of images that all tests share."""
    given = os.environ.get("VMFORK_TEST_IMAGES")
    return Path(given) if given else places.CACHE / "test-images" / "images"


def build(name: str = DEFAULT) -> str:
    """Have an image, as of the programs that are tested, in the store."""
    places.require_build()
    folder = store()
    if "VMFORK_TEST_IMAGES" not in os.environ:
        folder.mkdir(parents=True, exist_ok=True)
        cache = os.environ.get("VMFORK_TEST_CACHE", str(places.CACHE / "guest-images"))
        Path(cache).mkdir(parents=True, exist_ok=True)
        with (folder.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            command = build_command(name)
            done = subprocess.run(
                [places.VMFORK, "--state", folder.parent, "--no-start", *command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=BUILD_S,
                env={**os.environ, "VMFORK_NO_PROGRESS": "1", "VMFORK_CACHE": cache},
            )
        if done.returncode != 0:
            text = (done.stdout + done.stderr).decode("utf-8", "replace")
            raise RuntimeError(f"`vmfork {' '.join(command)}` ended with {done.returncode}:\n{text[-3000:]}")
    if not (folder / name).is_dir():
        raise RuntimeError(f"no image `{name}` in {folder}")
    return name


def link_into(images: Path, name: str) -> None:
    """Another store gets the image, by hard links where it can: no bytes are copied."""
    target = images / name
    if target.exists():
        return
    images.mkdir(parents=True, exist_ok=True)

    def link(source: str, to: str) -> None:
        try:
            os.link(source, to)
        except OSError:
            shutil.copy2(source, to)

    shutil.copytree(store() / name, target, copy_function=link, symlinks=True)
