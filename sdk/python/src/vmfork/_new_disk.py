"""Disks that a VM is to have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["NewDisk"]


@dataclass(frozen=True, slots=True)
class NewDisk:
    """A disk that a VM is to have; each method makes another kind.

    Clones get it as it is in the instant of the fork; what a VM writes is its own. A volume says
    itself what a fork does with it.
    """

    name: str
    source: Mapping[str, str | int]

    @classmethod
    def blank(cls, name: str, size_bytes: int) -> NewDisk:
        """An empty ext4 file system. The size is a multiple of 4096."""
        return cls(name, {"type": "blank", "size_bytes": size_bytes})

    @classmethod
    def image(cls, name: str, image: str) -> NewDisk:
        """The root file system of a guest image."""
        return cls(name, {"type": "image", "image": image})

    @classmethod
    def s3(cls, name: str, location: str) -> NewDisk:
        """A raw disk in an object store, at ``s3://BUCKET/KEY``. It is fetched as it is read.

        The credentials are those of the daemon's environment.
        """
        return cls(name, {"type": "object", "location": location})

    @classmethod
    def file(cls, name: str, path: str) -> NewDisk:
        """A raw file on the daemon's host, by its absolute path. It must not change meanwhile."""
        return cls(name, {"type": "file", "path": path})

    @classmethod
    def qcow2(cls, name: str, path: str) -> NewDisk:
        """What a qcow2 file on the daemon's host holds. It is converted before the VM starts.

        One with a backing file, an external data file or encryption is refused.
        """
        return cls(name, {"type": "file", "path": path, "format": "qcow2"})

    @classmethod
    def snapshot(cls, name: str, snapshot: str, disk: str | None = None) -> NewDisk:
        """A disk of a stored snapshot; default: the one of the same name."""
        source = {"type": "snapshot", "snapshot": snapshot, "disk": disk or name}
        return cls(name, source)

    @classmethod
    def volume(cls, name: str, volume: str) -> NewDisk:
        """A volume, which no other VM may have, unless it is read-only. It outlives the VM."""
        return cls(name, {"type": "volume", "volume": volume})

    @classmethod
    def empty(cls, name: str) -> NewDisk:
        """Nothing yet: a volume can be attached to it while the VM runs."""
        return cls(name, {"type": "empty"})

    def _json(self) -> dict[str, object]:
        return {"name": self.name, "source": dict(self.source)}
