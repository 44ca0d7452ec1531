"""Files below a directory, or objects below a prefix of a bucket, by their names there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.support.object_stores import ObjectStore


@dataclass(frozen=True, slots=True)
class DirectoryPlace:
    """Files below a directory."""

    root: Path

    @property
    def address(self) -> str:
        return str(self.root)

    def names(self) -> list[str]:
        paths = (Path(at) / name for at, _, names in os.walk(self.root) for name in names)
        return sorted(str(path.relative_to(self.root)) for path in paths)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def put(self, name: str, content: bytes) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(content)

    def delete(self, name: str) -> None:
        (self.root / name).unlink()


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """Objects below a prefix of a bucket."""

    store: ObjectStore
    bucket: str
    path: str = "run"

    @property
    def address(self) -> str:
        return f"s3://{self.bucket}/{self.path}"

    def names(self) -> list[str]:
        found = (n.partition(f"{self.path}/") for n in self.store.names(self.bucket))
        return [rest for before, slash, rest in found if slash and not before]

    def read(self, name: str) -> bytes:
        return self.store.read(self.bucket, f"{self.path}/{name}")

    def put(self, name: str, content: bytes) -> None:
        self.store.put(self.bucket, f"{self.path}/{name}", content)

    def delete(self, name: str) -> None:
        self.store.delete(self.bucket, f"{self.path}/{name}")


AnyPlace = DirectoryPlace | BucketPlace
