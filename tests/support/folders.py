"""Files below a directory, or objects below a prefix of a bucket, by their names there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorstore as ts

from tests.support.object_stores import ObjectStore


class Folder:
    """Where files are; ``address`` is the directory or URL."""

    def __init__(self, address: str, spec: dict[str, Any]) -> None:
        self.address, self._spec = address, spec
        self._files = ts.KvStore.open(spec).result()

    def __truediv__(self, name: str) -> Folder:
        spec = {**self._spec, "path": f"{self._spec['path']}{name}/"}
        return Folder(f"{self.address}/{name}", spec)

    def names(self) -> list[str]:
        return sorted(name.decode() for name in self._files.list().result())

    def read(self, name: str) -> bytes:
        return bytes(self._files[name])

    def put(self, name: str, content: bytes) -> None:
        self._files[name] = content

    def delete(self, name: str) -> None:
        del self._files[name]


def folder_on_disk(root: Path) -> Folder:
    return Folder(str(root), {"driver": "file", "path": f"{root}/"})


def folder_in_bucket(store: ObjectStore, bucket: str, path: str = "run") -> Folder:
    """A folder for which the environment has the keys of the store."""
    spec = {
        "driver": "s3",
        "endpoint": store.endpoint,
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "environment"},
        "bucket": bucket,
        "path": f"{path}/",
    }
    return Folder(f"s3://{bucket}/{path}", spec)
