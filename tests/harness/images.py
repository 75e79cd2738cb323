"""Guest images: built once, kept in a store that all tests share, linked into each daemon's."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

from . import places

#: The default guest image's name.
DEFAULT = os.environ.get("VMFORK_TEST_IMAGE", "debian")

BUILD_S = 1200.0

#: How an image is built into a state folder, in one place.
BUILD = ["image", "build", "--name", DEFAULT]


def store() -> Path:
    """The folder of images that all tests share."""
    given = os.environ.get("VMFORK_TEST_IMAGES")
    return Path(given) if given else places.CACHE / "test-images" / "images"


def build() -> str:
    """Have the default image in the store; builds it if it is not there."""
    places.require_build()
    folder = store()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / DEFAULT).is_dir():
            done = subprocess.run(
                [places.VMFORK, "--state", folder.parent, "--no-start", *BUILD],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=BUILD_S,
                env={**os.environ, "VMFORK_NO_PROGRESS": "1"},
            )
            if done.returncode != 0:
                text = (done.stdout + done.stderr).decode("utf-8", "replace")
                raise RuntimeError(f"`vmfork {' '.join(BUILD)}` ended with {done.returncode}:\n{text[-3000:]}")
        if not (folder / DEFAULT).is_dir():
            raise RuntimeError(f"no image `{DEFAULT}` in {folder} after its build")
    return DEFAULT


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
