"""Where checkpoints are, as somebody sees them who knows the layout and not the package."""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from tests.chaos.format2_files import Files
from tests.support.faulty_proxy import FaultyProxy
from tests.support.object_stores import Moto, ObjectStore
from tests.support.ports import free_port

MARKER = "metadata.json"
_ITERATION = re.compile(r"iter_(\d+)\Z")


class Site(Protocol):
    """Holds global checkpoints."""

    @property
    def address(self) -> str:
        """Of all of them, for the package."""
        ...

    def finished(self) -> dict[str, int]:
        """Those that have a marker, and their iterations."""
        ...

    def remove(self, name: str) -> None:
        """Take one away."""
        ...

    def files(self, name: str) -> Files:
        """The files of one."""
        ...

    def write(self, name: str, file: str, content: bytes) -> None:
        """Put something else in the place of a file."""
        ...


def checkpoint_at(address: str, iteration: int) -> str:
    """Where the global checkpoint of an iteration is, below an address."""
    return f"{address}/iter_{iteration:07d}"


@dataclass(frozen=True, slots=True)
class DiskSite:
    """A directory; see Site.

    Attributes:
        root: the directory.
    """

    root: Path

    @property
    def address(self) -> str:
        return str(self.root)

    def finished(self) -> dict[str, int]:
        found = {path.name: _ITERATION.match(path.name) for path in self.root.glob("iter_*")}
        return {
            f"{self.root}/{name}": int(match[1])
            for name, match in found.items()
            if match and (self.root / name / MARKER).exists()
        }

    def remove(self, name: str) -> None:
        shutil.rmtree(name)

    def files(self, name: str) -> Files:
        return Files.below(Path(name))

    def write(self, name: str, file: str, content: bytes) -> None:
        (Path(name) / file).write_bytes(content)


@dataclass(frozen=True, slots=True)
class BucketSite:
    """A bucket; see Site.

    Attributes:
        store: the server.
        bucket: its name.
    """

    store: ObjectStore
    bucket: str

    @property
    def address(self) -> str:
        return f"s3://{self.bucket}/run"

    def finished(self) -> dict[str, int]:
        found = (name.rpartition("/") for name in self.store.names(self.bucket))
        tops = {top for top, _, last in found if last == MARKER and "/save-" not in top}
        return {
            f"s3://{self.bucket}/{top}": int(match[1])
            for top in tops
            if (match := _ITERATION.search(top))
        }

    def remove(self, name: str) -> None:
        for key in self._keys(name):
            self.store.delete(self.bucket, key)

    def files(self, name: str) -> Files:
        with tempfile.TemporaryDirectory() as scratch:
            for key in self._keys(name):
                path = Path(scratch) / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.store.read(self.bucket, key))
            return Files.below(Path(scratch) / self.store.place(self.bucket, self._key(name)))

    def write(self, name: str, file: str, content: bytes) -> None:
        place = self.store.place(self.bucket, self._key(name))
        self.store.put(self.bucket, f"{place}/{file}", content)

    def empty(self) -> None:
        """Nothing is left, nor the bucket."""
        for key in self.store.names(self.bucket):
            self.store.delete(self.bucket, key)
        self.store.client().delete_bucket(Bucket=self.bucket)

    def make(self) -> None:
        """Make the bucket."""
        self.store.make_bucket(self.bucket)

    def _key(self, name: str) -> str:
        return name.removeprefix(f"s3://{self.bucket}/")

    def _keys(self, name: str) -> list[str]:
        start = f"{self._key(name)}/"
        return [key for key in self.store.names(self.bucket) if key.startswith(start)]


class ObjectServer:
    """A moto server, a proxy before it that can be gone, and a bucket; all end with the block."""

    def __init__(self) -> None:
        self._moto = Moto(free_port())
        self.proxy = FaultyProxy(self._moto.store)
        self.site = BucketSite(self._moto.store, "chaos")

    def __enter__(self) -> Self:
        """The server, up."""
        self.site.make()
        self.proxy.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it."""
        self.proxy.__exit__(kind, error, trace)
        self._moto.kill()

    def outage(self, delay_s: float, length_s: float, *, is_emptied: bool) -> threading.Thread:
        """After a delay it is gone for a while, and comes back; with nothing, if it is emptied."""

        def happen() -> None:
            time.sleep(delay_s)
            self.proxy.is_down = True
            if is_emptied:
                self.site.empty()
            time.sleep(length_s)
            self.proxy.is_down = False

        thread = threading.Thread(target=happen, daemon=True)
        thread.start()
        return thread
