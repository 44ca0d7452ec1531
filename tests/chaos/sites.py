"""Where checkpoints are, as somebody sees them who knows the layout and not the package."""

from __future__ import annotations

import re
import shutil
import socket
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from benchmarks.faults.format2_damage import Files
from tests.chaos.oracle import CopyKey, SaveKey
from tests.support.object_stores import Moto, ObjectStore
from tests.support.ports import free_port

MARKER = "metadata.json"
_HOST = "127.0.0.1"
_ITERATION = re.compile(r"iter_(\d+)\Z")
_COPY = re.compile(r"iter_(\d+)_(\d+)_local_([0-9a-f]+)\.part")
_BUFFER_NBYTES = 1 << 16
_PAUSE_S = 0.02


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


def local_copies(root: Path) -> dict[CopyKey, Path]:
    """The files of local checkpoints below the directories of all nodes."""
    found = {}
    for path in root.glob("node*/*/*.part"):
        match = _COPY.fullmatch(path.name)
        if match:
            key = CopyKey(SaveKey(int(match[1]), match[3]), int(match[2]), int(path.parent.name))
            found[key] = path
    return found


class Relay:
    """Stands before a server, under an address that stays; it can be gone for a while.

    Args:
        store: the server.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._target = (_HOST, int(store.endpoint.rpartition(":")[2]))
        self._port = free_port()
        self.store = ObjectStore(f"http://{_HOST}:{self._port}")
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None

    def up(self) -> None:
        """Take connections."""
        self._listener = socket.create_server((_HOST, self._port), reuse_port=False)
        threading.Thread(target=self._accept, args=[self._listener], daemon=True).start()

    def down(self) -> None:
        """Break all connections, and refuse others."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            broken, self._open = self._open, set()
        for one in broken:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                theirs, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=[theirs], daemon=True).start()

    def _connect(self, theirs: socket.socket) -> None:
        with theirs:
            try:
                ours = socket.create_connection(self._target)
            except OSError:
                return
            with ours:
                with self._lock:
                    self._open |= {theirs, ours}
                back = threading.Thread(target=_pump, args=[ours, theirs], daemon=True)
                back.start()
                _pump(theirs, ours)
                back.join()
                with self._lock:
                    self._open -= {theirs, ours}


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Pass on what comes, until one side ends."""
    with suppress(OSError):
        while content := source.recv(_BUFFER_NBYTES):
            target.sendall(content)
    for one in (source, target):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


class ObjectServer:
    """A moto server, the relay before it, and a bucket. Leaving the block ends it."""

    def __init__(self) -> None:
        self._moto = Moto(free_port())
        self.relay = Relay(self._moto.store)
        self.site = BucketSite(self._moto.store, "chaos")

    def __enter__(self) -> Self:
        """The server, up."""
        self.site.make()
        self.relay.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it."""
        self.relay.down()
        self._moto.kill()

    def outage(self, delay_s: float, length_s: float, *, is_emptied: bool) -> threading.Thread:
        """After a delay it is gone for a while, and comes back; with nothing, if it is emptied."""

        def happen() -> None:
            time.sleep(delay_s)
            self.relay.down()
            if is_emptied:
                self.site.empty()
            time.sleep(length_s)
            self.relay.up()

        thread = threading.Thread(target=happen, daemon=True)
        thread.start()
        return thread
