"""A bucket of a server that was started for the benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders.roster import missing_package
from tests.support.object_stores import Radosgw, moto, why_no_radosgw

RADOSGW, MOTO = "radosgw", "moto"
_DELETES_AT_A_TIME = 1000


@dataclass(frozen=True, slots=True)
class StoreSite:
    """Where checkpoints go; the credentials are in the environment.

    Attributes:
        server: its kind.
        endpoint: its URL.
        bucket: made already.
    """

    server: str
    endpoint: str
    bucket: str

    def url(self, name: str) -> str:
        """Of a checkpoint."""
        return f"s3://{self.bucket}/{name}"


def why_not(server: str) -> str | None:
    """Why there can be no such server here; None where there can."""
    if missing := missing_package("boto3"):
        return missing
    return why_no_radosgw() if server == RADOSGW else missing_package("moto")


@contextmanager
def open_store(server: str, directory: Path) -> Iterator[Any]:
    """A server with its files in a directory, ended on leaving; see tests/support."""
    if server == MOTO:
        with moto() as store:
            yield store
        return
    ceph = Radosgw(directory)
    try:
        yield ceph.store
    finally:
        ceph.stop()


def delete_below(client: Any, bucket: str, name: str) -> None:
    """Delete all objects of a checkpoint."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{name}/")
    found = [{"Key": one["Key"]} for page in pages for one in page.get("Contents", ())]
    for start in range(0, len(found), _DELETES_AT_A_TIME):
        some = found[start : start + _DELETES_AT_A_TIME]
        client.delete_objects(Bucket=bucket, Delete={"Objects": some, "Quiet": True})
