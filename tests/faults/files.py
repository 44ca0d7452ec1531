"""What the bytes of checkpoint files are, by the pages of the formats, and how they are damaged."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dist_ckpt_strategies.storage.files import LOCK_NAME
from tests.faults.oracle import CopyKey, Place, SaveKey

_FLIP_SHARE = 5 / 6


class Kind(StrEnum):
    """What a file of a checkpoint of packs, or a byte of it, is."""

    MARKER = "metadata.json"
    COMMON = "common.pt"
    INDEX = "index"
    FULL_INDEX = "saves/index"
    PACK = "pack"
    HEADER = "pack's header"
    PADDING = "pack's padding"


_OF_A_PACK = (Kind.HEADER, Kind.PADDING)


class Fault(StrEnum):
    FLIP = "flip"
    TRUNCATE = "truncate"
    DELETE = "delete"
    EXTEND = "extend"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Damage:
    """What happens to files together."""

    fault: Fault  # what is done
    what: Kind | Place  # the kind of file or bytes
    # what the files hold then, by name; None: the file is gone.
    contents: Mapping[str, bytes | None]
    harmless: str = ""  # why a load need not notice; empty: it has to


SAME = "nothing that counts has changed"
_FOR_MEGATRON = "for Megatron-Core's own readers; a load reads its copy in the packs"
_BY_INDEX = "a load reads what the index says, where the index says"
_HARMLESS: Mapping[tuple[Fault, Kind], str] = {
    **{(fault, kind): _FOR_MEGATRON for fault in Fault for kind in (Kind.MARKER, Kind.COMMON)},
    **{(Fault.FLIP, kind): _BY_INDEX for kind in _OF_A_PACK},
    **{(Fault.EXTEND, kind): _BY_INDEX for kind in (Kind.PACK, Kind.FULL_INDEX)},
}


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a checkpoint of packs: their content by name."""

    contents: Mapping[str, bytes]

    @classmethod
    def below(cls, root: Path) -> Files:
        """Those of a finished checkpoint."""
        paths = sorted(
            path for path in root.rglob("*") if path.is_file() and path.name != LOCK_NAME
        )
        return cls({str(path.relative_to(root)): path.read_bytes() for path in paths})

    def damaged(self, chance: random.Random) -> Damage:
        """A byte changes mostly; else another fault happens."""
        if chance.random() < _FLIP_SHARE:
            name, at = self._any_byte(chance)
            flipped = _flipped(self.contents[name], at, chance)
            return self._damage(Fault.FLIP, self._kind_at(name, at), {name: flipped})
        fault = chance.choice([one for one in Fault if one is not Fault.FLIP])
        kind = chance.choice([one for one in Kind if one not in _OF_A_PACK])
        name = chance.choice(self._of_kind(kind))
        content = self.contents[name]
        contents: dict[str, bytes | None] = {name: None}
        if fault is Fault.TRUNCATE:
            contents = {name: content[: chance.randrange(len(content))]}
        elif fault is Fault.EXTEND:
            more = chance.choice([b"\0", b" ", b"}", chance.randbytes(chance.randrange(1, 5000))])
            contents = {name: content + more}
        elif fault is Fault.SWAP:
            alike = [one for one in self._of_kind(kind) if one != name]
            others = chance.choice([alike, []]) or [one for one in self.contents if one != name]
            other = chance.choice(others)
            contents = {name: self.contents[other], other: content}
        return self._damage(fault, kind, contents)

    def _damage(self, fault: Fault, kind: Kind, contents: Mapping[str, bytes | None]) -> Damage:
        kinds = {kind} if len(contents) == 1 else set(map(kind_of_file, contents))
        reasons = {_HARMLESS.get((fault, one), "") for one in kinds}
        harmless = "; ".join(sorted(reasons)) if all(reasons) else ""
        if all(_is_same(self.contents[name], content, name) for name, content in contents.items()):
            harmless = SAME
        return Damage(fault, kind, contents, harmless)

    def _of_kind(self, kind: Kind) -> list[str]:
        return [name for name in self.contents if kind_of_file(name) is kind]

    def _any_byte(self, chance: random.Random) -> tuple[str, int]:
        """A file, by size, of all or of a kind so that all are hit; and a byte of it."""
        kind = chance.choice([None, *Kind])
        if kind in _OF_A_PACK:
            name = chance.choice(self._of_kind(Kind.PACK))
            places = self._places(name)
            start, stop = places.get(kind, places[Kind.HEADER])
            return name, chance.randrange(start, stop)
        names = list(self.contents) if kind is None else self._of_kind(kind)
        (name,) = chance.choices(names, [len(self.contents[one]) for one in names])
        return name, chance.randrange(len(self.contents[name]))

    def _kind_at(self, name: str, byte_offset: int) -> Kind:
        kind = kind_of_file(name)
        if kind is Kind.PACK:
            for found, (start, stop) in self._places(name).items():
                kind = found if start <= byte_offset < stop else kind
        return kind

    def _places(self, name: str) -> dict[Kind, tuple[int, int]]:
        """Where the parts of a pack are that a load does not read."""
        content = self.contents[name]
        first = 8 + int.from_bytes(content[:8], "little")
        found = {Kind.HEADER: (0, first)}
        padding = json.loads(content[8:first]).get("__padding__")
        if padding is not None:
            start, stop = padding["data_offsets"]
            found[Kind.PADDING] = first + start, first + stop
        return found


def kind_of_file(name: str) -> Kind:
    """What a file is, by its name."""
    if name.startswith("packs/"):
        return Kind.PACK
    return Kind.FULL_INDEX if name.startswith("saves/") else Kind(name)


def _flipped(content: bytes, byte_offset: int, chance: random.Random) -> bytes:
    change = bytes([content[byte_offset] ^ chance.randrange(1, 256)])
    return content[:byte_offset] + change + content[byte_offset + 1 :]


def _is_same(before: bytes, after: bytes | None, name: str) -> bool:
    """Whether nothing that counts has changed: equal bytes, or spaces in JSON."""
    if before == after or after is None or kind_of_file(name) not in {Kind.MARKER, Kind.INDEX}:
        return before == after
    try:
        return bool(json.loads(before) == json.loads(after))
    except ValueError:
        return False


_COPY = re.compile(r"iter_(\d+)_(\d+)_local_([0-9a-f]+)\.safetensors")


def local_copies(root: Path) -> dict[CopyKey, Path]:
    """The files of local checkpoints below the directories of all nodes."""
    found = {}
    for path in sorted(root.glob("node*/*/*.safetensors")):
        match = _COPY.fullmatch(path.name)
        if match:
            key = CopyKey(SaveKey(int(match[1]), match[3]), int(match[2]), int(path.parent.name))
            found[key] = path
    return found


def damaged_copies(copies: Mapping[CopyKey, Path], chance: random.Random) -> Damage:
    """Of a part of the newest save: one copy, both, or both and those of the save before.

    A byte changes mostly, of all of a file or of a kind; else the file is cut.
    """
    saves = sorted({key.save for key in copies}, reverse=True)
    owner = chance.choice(sorted({key.owner for key in copies if key.save == saves[0]}))
    num_saves, is_one = chance.choice([(1, True), (1, False), (2, False)])
    fault = Fault.FLIP if chance.random() < _FLIP_SHARE else Fault.TRUNCATE
    place: Place | None = chance.choice([None, *Place])
    contents: dict[str, bytes | None] = {}
    for save in saves[:num_saves]:
        keys = [key for key in copies if (key.save, key.owner) == (save, owner)]
        if not keys:
            continue
        keys.sort(key=lambda key: key.holder != owner)
        content = copies[keys[0]].read_bytes()
        if fault is Fault.TRUNCATE:
            new = content[: chance.randrange(len(content))]
        else:
            place, at = _any_byte_of(content, place, chance)
            new = _flipped(content, at, chance)
        contents |= {str(copies[key]): new for key in (keys[:1] if is_one else keys)}
    what = place if fault is Fault.FLIP and place else Place.HEADER  # the end is of the header
    return Damage(fault, what, contents)


def _any_byte_of(content: bytes, place: Place | None, chance: random.Random) -> tuple[Place, int]:
    """What a byte of a local shard file is, and where it is."""
    spans = [(found, start, end) for found, start, end in _spans(content) if start < end]
    spans = [one for one in spans if one[0] is place] or spans
    ((found, start, end),) = chance.choices(spans, [end - start for _, start, end in spans])
    return found, chance.randrange(start, end)


def _spans(content: bytes) -> Iterable[tuple[Place, int, int]]:
    """What each byte of a local shard file is, where that begins and ends."""
    first = 8 + int.from_bytes(content[:8], "little")
    yield Place.HEADER, 0, first
    described = json.loads(content[8:first])
    del described["__metadata__"]
    table, end = described.pop("__digests__")["data_offsets"]
    yield from (
        (Place.TENSOR, first + start, first + stop)
        for start, stop in (tensor["data_offsets"] for tensor in described.values())
    )
    yield Place.HEADER, first + table, first + end
