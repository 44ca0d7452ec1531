"""What is done to checkpoints, disks and servers from outside of the ranks."""

from __future__ import annotations

import random
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.faults.files import HARMLESS, Fault, Files, Kind, file_map, local_copies
from tests.faults.oracle import CopyKey, Ledger, Place, Status
from tests.faults.schedule import Event, Store, Strike
from tests.support.disks import fill_disk
from tests.support.faulty_proxy import FaultyProxy
from tests.support.object_stores import ObjectStore, moto
from tests.support.places import AnyPlace, BucketPlace, DirectoryPlace

_TENSOR_SHARE = 0.4
_MAX_DELAY_S = 0.25
_MAX_OUTAGE_S = 0.6
_MAX_LEFT_NBYTES = 300_000
_FINISHED = re.compile(r"(iter_(\d+))/metadata\.json")
_SAVE = re.compile(r"save-[^/]+/")


def checkpoint_at(address: str, iteration: int) -> str:
    """Where the global checkpoint of an iteration is, below an address."""
    return f"{address}/iter_{iteration:07d}"


def finished_in(place: AnyPlace) -> dict[str, int]:
    """The addresses of the checkpoints that have a marker, and their iterations."""
    found = (_FINISHED.fullmatch(name) for name in place.names())
    return {f"{place.address}/{match[1]}": int(match[2]) for match in found if match}


def remove(place: AnyPlace, address: str) -> None:
    """Take a checkpoint away."""
    if isinstance(place, DirectoryPlace):
        shutil.rmtree(address)
        return
    top = address.rpartition("/")[2]
    for name in [name for name in place.names() if name.startswith(f"{top}/")]:
        place.delete(name)


def flip_global(place: AnyPlace, address: str, chance: random.Random, change: int) -> bool:
    """Change a byte of a global checkpoint.

    Returns whether a load need not notice. Of the marker, what JSON says is nothing may change too.
    """
    top = f"{address.rpartition('/')[2]}/"
    names = {  # in a bucket all but the marker is below a prefix of the save's own
        _SAVE.sub("", name.removeprefix(top), count=1): name
        for name in place.names()
        if name.startswith(top)
    }
    files = Files(Path(top), {name: place.read(where) for name, where in sorted(names.items())})
    name, at = files.any_byte(chance)
    content = bytearray(files.contents[name])
    content[at] ^= change
    place.put(names[name], bytes(content))
    kind = files.kind_at(name, at)
    return kind is Kind.MARKER or (Fault.FLIP, kind) in HARMLESS


def flip_copy(path: Path, chance: random.Random, change: int) -> Place:
    """Change a byte of a local checkpoint's file: of a tensor mostly, else of any kind."""
    content = bytearray(path.read_bytes())
    spans = file_map(bytes(content))
    is_tensor = chance.random() < _TENSOR_SHARE
    place = Place.TENSOR if is_tensor else chance.choice(sorted({one.place for one in spans}))
    span = chance.choice([span for span in spans if span.place is place])
    content[chance.randrange(span.start, span.end)] ^= change
    path.write_bytes(content)
    return place


def choose_copies(
    copies: dict[CopyKey, Path], chance: random.Random, *, both: bool
) -> list[CopyKey]:
    """A copy of some shard of the newest local save, its owner's if there is; or all copies."""
    newest = max(key.save for key in copies)
    found = sorted(key for key in copies if key.save == newest)
    one = chance.choice([key for key in found if key.owner == key.holder] or found)
    alike = [key for key in found if key.owner == one.owner]
    return alike if both else [one]


@dataclass(frozen=True, slots=True)
class ObjectServer:
    """A moto server, a proxy before it that can be gone, and a bucket."""

    store: ObjectStore
    proxy: FaultyProxy

    @property
    def place(self) -> BucketPlace:
        """Where checkpoints go."""
        return BucketPlace(self.store, "campaign")

    def make_bucket(self) -> None:
        """Make the bucket."""
        self.store.make_bucket(self.place.bucket)

    @contextmanager
    def outage(self, delay_s: float, length_s: float, *, is_emptied: bool) -> Iterator[None]:
        """After a delay it is gone for a while, and comes back; with nothing, if it is emptied."""

        def happen() -> None:
            time.sleep(delay_s)
            self.proxy.is_down = True
            if is_emptied:
                for name in self.place.names():
                    self.place.delete(name)
                self.store.client().delete_bucket(Bucket=self.place.bucket)
            time.sleep(length_s)
            self.proxy.is_down = False

        thread = threading.Thread(target=happen, daemon=True)
        thread.start()
        try:
            yield
        finally:
            thread.join()
            if is_emptied:
                self.make_bucket()


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """One that is ended on leaving."""
    with moto() as store, FaultyProxy(store) as proxy:
        server = ObjectServer(store, proxy)
        server.make_bucket()
        yield server


@dataclass(frozen=True, slots=True)
class Outside:
    """What events do from outside of the ranks.

    Attributes:
        root: holds the directories of the nodes, and of the global checkpoints.
        server: the object store, if there is one.
        can_fill: whether ``root`` is on a small disk of its own.
    """

    root: Path
    server: ObjectServer | None
    can_fill: bool

    def places(self) -> list[AnyPlace]:
        """All places of global checkpoints."""
        disk = DirectoryPlace(self.root / "global")
        return [disk, *([self.server.place] if self.server else [])]

    def place_of(self, event: Event) -> AnyPlace:
        """Where the global checkpoints of an event go."""
        return self.places()[event.store is Store.OBJECTS]

    @contextmanager
    def during(self, event: Event | None) -> Iterator[None]:
        """Within the block, what the ranks do not do to themselves."""
        strike = event.strike if event else None
        share = event.share if event else 0.0
        context: AbstractContextManager[None] = nullcontext()
        if strike is Strike.FULL and self.can_fill:
            # Half of the times nothing is left.
            context = self._full(max(0, int((share - 0.5) * 2 * _MAX_LEFT_NBYTES)))
        elif strike in {Strike.RESTART, Strike.EMPTIED}:
            assert self.server is not None
            is_emptied = strike is Strike.EMPTIED
            length_s = (1 - share) * _MAX_OUTAGE_S
            context = self.server.outage(share * _MAX_DELAY_S, length_s, is_emptied=is_emptied)
        elif strike is Strike.LOSE_NODE and event is not None:
            context = self._lost_node(event)
        with context:
            yield

    def damaged(self, event: Event, ledger: Ledger) -> Ledger | None:
        """Change what is stored; the ledger then, None if there was nothing to change."""
        if event.strike is Strike.LOSE_NODE:
            if not self._node(event).exists():
                return None
            shutil.rmtree(self._node(event))
            return ledger.without_node(event.victim)
        if event.strike is Strike.FLIP_LOCAL:
            return self._flipped_local(event, ledger)
        place = self.place_of(event)
        untouched = {
            name: iteration
            for name, (iteration, status) in ledger.global_.items()
            if name.startswith(place.address) and status is Status.WHOLE
        }
        if not untouched:
            return None
        newest = max(untouched, key=untouched.__getitem__)
        if event.strike is Strike.LOSE_GLOBAL:
            remove(place, newest)
            return ledger.without_global([newest])
        is_harmless = flip_global(place, newest, event.chance(), event.change)
        return ledger.damaged_global(newest, is_harmless=is_harmless)

    def _flipped_local(self, event: Event, ledger: Ledger) -> Ledger | None:
        good = {
            key: path
            for key, path in local_copies(self.root).items()
            if ledger.copies[key].content is not Status.BROKEN
        }
        if not good:
            return None
        chance = event.chance()
        for key in choose_copies(good, chance, both=event.call % 2 == 0):
            place = flip_copy(good[key], chance, event.change)
            ledger = ledger.damaged_copy(key, place)
        return ledger

    @contextmanager
    def _full(self, leaving_nbytes: int) -> Iterator[None]:
        fill_disk(self.root, leaving_nbytes=leaving_nbytes)
        try:
            yield
        finally:
            (self.root / ".ballast").unlink()

    @contextmanager
    def _lost_node(self, event: Event) -> Iterator[None]:
        delay_s = event.share * _MAX_DELAY_S
        timer = threading.Timer(delay_s, shutil.rmtree, [self._node(event), True])
        timer.start()
        yield
        timer.join()

    def _node(self, event: Event) -> Path:
        return self.root / f"node{event.victim}"
