"""What is done to checkpoints, disks and servers from outside of the ranks."""

import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dist_ckpt_strategies.storage.files import LOCK_NAME
from tests.faults.files import Files, damaged_copies, local_copies
from tests.faults.oracle import Ledger, Place, Status
from tests.faults.schedule import Event, Store, Strike
from tests.support.faulty_proxy import FaultyProxy
from tests.support.folders import Folder, folder_in_bucket, folder_on_disk
from tests.support.object_stores import moto

_MAX_DELAY_S = 0.25
_MAX_OUTAGE_S = 0.6
_FINISHED = re.compile(r"(iter_(\d+))/metadata\.json")


@dataclass(frozen=True, slots=True)
class Outside:
    """The disks of the nodes and of the global checkpoints, and the object store."""

    root: Path
    server: FaultyProxy

    def places(self) -> list[Folder]:
        in_bucket = folder_in_bucket(self.server.store, "campaign")
        return [folder_on_disk(self.root / "global"), in_bucket]

    def place_of(self, event: Event) -> Folder:
        return self.places()[event.store is Store.OBJECTS]

    def finished(self) -> dict[str, int]:
        """The addresses of the global checkpoints that have a marker, and their iterations."""
        found = {}
        for place in self.places():
            for match in filter(None, map(_FINISHED.fullmatch, place.names())):
                found[f"{place.address}/{match[1]}"] = int(match[2])
        return found

    @contextmanager
    def during(self, event: Event) -> Iterator[None]:
        """Within the block, what the ranks do not do to themselves."""

        def happen() -> None:
            time.sleep(event.share * _MAX_DELAY_S)
            if event.strike is Strike.LOSE_NODE:
                shutil.rmtree(self._node(event), ignore_errors=True)
            else:
                self.server.is_down = True
                time.sleep((1 - event.share) * _MAX_OUTAGE_S)
                self.server.is_down = False

        thread = threading.Thread(target=happen, daemon=True)
        if event.strike in {Strike.LOSE_NODE, Strike.OUTAGE}:
            thread.start()
        try:
            yield
        finally:
            if thread.ident:
                thread.join()

    def damaged(self, event: Event, ledger: Ledger) -> Ledger | None:
        """Change what is stored; the ledger then, None if there was nothing to change."""
        if event.strike is Strike.DAMAGE_LOCAL:
            return self._damaged_local(event, ledger)
        if event.strike is Strike.DAMAGE_GLOBAL:
            return self._damaged_global(event, ledger)
        if not self._node(event).exists():
            return None
        shutil.rmtree(self._node(event))
        return ledger.without_node(event.victim)

    def _damaged_local(self, event: Event, ledger: Ledger) -> Ledger | None:
        found = local_copies(self.root)
        copies = {key: path for key, path in found.items() if ledger.copies[key] is None}
        if not copies:
            return None
        damage = damaged_copies(copies, event.chance())
        for key, path in copies.items():
            content = damage.contents.get(str(path))
            if content is not None:
                path.write_bytes(content)
                ledger = ledger.damaged_copy(key, Place(damage.what))
        return ledger

    def _damaged_global(self, event: Event, ledger: Ledger) -> Ledger | None:
        place = self.place_of(event)
        untouched = {
            name: iteration
            for name, (iteration, status) in ledger.global_.items()
            if name.startswith(place.address) and status is Status.WHOLE
        }
        if not untouched:
            return None
        newest = max(untouched, key=untouched.__getitem__)
        top = f"{newest.rpartition('/')[2]}/"
        names = {
            name.removeprefix(top): name
            for name in place.names()
            if name.startswith(top) and not name.endswith(LOCK_NAME)
        }
        files = Files({name: place.read(where) for name, where in sorted(names.items())})
        damage = files.damaged(event.chance())
        for name, content in damage.contents.items():
            if content is None:
                place.delete(names[name])
            else:
                place.put(names[name], content)
        if newest not in self.finished():
            return ledger.without_global([newest])
        status = Status.UNSURE if damage.harmless else Status.BROKEN
        return ledger.with_global(newest, untouched[newest], status)

    def _node(self, event: Event) -> Path:
        return self.root / f"node{event.victim}"


@contextmanager
def object_server() -> Iterator[FaultyProxy]:
    """A proxy before a moto server with a bucket; both are ended on leaving."""
    with moto() as store, FaultyProxy(store) as proxy:
        store.make_bucket("campaign")
        yield proxy
