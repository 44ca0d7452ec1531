"""Damage to the files of a checkpoint of format 2: what is hit, and what a load may come to then.

What a byte is follows the layout as it is documented, and takes nothing from the package.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

_INDEX_ENTRY_NBYTES = 16
_CRC_NBYTES = 4


class Kind(StrEnum):
    """What a file, or a byte of it, is."""

    MARKER = "metadata.json"
    COMMON = "common.pt"
    INDEX = "manifest/index.json"
    PART = "manifest/part"
    SAVE = "manifest/save.json"
    PACK = "objects"
    ZARR = "zarr.json"
    CHUNK = "chunk"
    CHUNK_INDEX = "chunk's index"


class Fault(StrEnum):
    """What is done to files."""

    FLIP = "flip"
    TRUNCATE = "truncate"
    DELETE = "delete"
    EXTEND = "extend"
    SWAP = "swap"


_FOR_OTHERS = "for readers without this package; a load takes shapes from the manifest"
_OF_THE_BEGIN = "says when the save began; nothing reads it in a finished checkpoint"
_ANY = tuple(Fault)

HARMLESS: Mapping[tuple[Fault, Kind], str] = {
    (fault, kind): why
    for kind, faults, why in (
        (Kind.ZARR, _ANY, _FOR_OTHERS),
        (Kind.SAVE, _ANY, _OF_THE_BEGIN),
        (Kind.CHUNK_INDEX, (Fault.FLIP,), _FOR_OTHERS),
        (Kind.PACK, (Fault.EXTEND,), "objects are read by where they begin and end"),
    )
    for fault in faults
}
"""What a load need not notice, and why. Of the marker also what JSON says is nothing."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One case.

    Attributes:
        number: of the case.
        fault: what is done.
        kind: what is hit; of a swap, the first file's.
        names: the files, below the checkpoint.
        byte_offset: of a flip; the size that is left of a truncation.
        change: of a flip, what the byte is XORed with; of an extension, the bytes.
    """

    number: int
    fault: Fault
    kind: Kind
    names: tuple[str, ...]
    byte_offset: int = 0
    change: bytes = b""


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a checkpoint.

    Attributes:
        root: the checkpoint.
        contents: of each file, by its name.
        by_kind: their names.
        index_starts: where the index of each chunk's file begins.
    """

    root: Path
    contents: Mapping[str, bytes]
    by_kind: Mapping[Kind, tuple[str, ...]] = field(repr=False)
    index_starts: Mapping[str, int] = field(repr=False)

    @classmethod
    def below(cls, root: Path) -> Files:
        """Those of a finished checkpoint."""
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        contents = {str(path.relative_to(root)): path.read_bytes() for path in paths}
        by_kind: dict[Kind, list[str]] = defaultdict(list)
        for name in contents:
            by_kind[kind_of_file(name)].append(name)
        starts = {name: _index_start(name, contents) for name in by_kind[Kind.CHUNK]}
        return cls(root, contents, {kind: tuple(by_kind[kind]) for kind in by_kind}, starts)

    def kind_at(self, name: str, byte_offset: int) -> Kind:
        """What a byte is."""
        if name in self.index_starts and byte_offset >= self.index_starts[name]:
            return Kind.CHUNK_INDEX
        return kind_of_file(name)

    @contextmanager
    def damaged(self, damage: Damage) -> Iterator[None]:
        """Damage the files for the block."""
        paths = [self.root / name for name in damage.names]
        try:
            self._apply(damage, paths)
            yield
        finally:
            if damage.fault is Fault.FLIP:
                at = damage.byte_offset
                _overwrite(paths[0], at, self.contents[damage.names[0]][at : at + 1])
            else:
                for path, name in zip(paths, damage.names, strict=True):
                    path.write_bytes(self.contents[name])

    def _apply(self, damage: Damage, paths: list[Path]) -> None:
        path, content = paths[0], self.contents[damage.names[0]]
        match damage.fault:
            case Fault.FLIP:
                at = damage.byte_offset
                _overwrite(path, at, bytes([content[at] ^ damage.change[0]]))
            case Fault.TRUNCATE:
                os.truncate(path, damage.byte_offset)
            case Fault.DELETE:
                path.unlink()
            case Fault.EXTEND:
                with path.open("ab") as file:
                    file.write(damage.change)
            case Fault.SWAP:
                path.write_bytes(self.contents[damage.names[1]])
                paths[1].write_bytes(content)

    def is_same(self, damage: Damage) -> bool:
        """Whether nothing that counts has changed: equal files, or spaces of the marker."""
        if damage.fault is Fault.SWAP:
            one, other = (self.contents[name] for name in damage.names)
            return one == other
        if damage.kind is not Kind.MARKER or damage.fault is Fault.DELETE:
            return False
        try:
            found = json.loads((self.root / damage.names[0]).read_bytes())
        except ValueError:
            return False
        return bool(found == json.loads(self.contents[damage.names[0]]))

    def why_passed(self, damage: Damage) -> str:
        """Why a load did not have to notice a damage."""
        if self.is_same(damage):
            return "nothing that counts has changed"
        kinds = sorted({self.kind_at(name, damage.byte_offset) for name in damage.names})
        return "; ".join(dict.fromkeys(HARMLESS[damage.fault, kind] for kind in kinds))

    def may_pass(self, damage: Damage) -> bool:
        """Whether a load may bring what was saved, as if nothing were."""
        kinds = {self.kind_at(name, damage.byte_offset) for name in damage.names}
        if damage.fault is Fault.TRUNCATE:
            kinds = {kind_of_file(name) for name in damage.names}
        return all((damage.fault, kind) in HARMLESS for kind in kinds) or self.is_same(damage)


def kind_of_file(name: str) -> Kind:
    """What a file is, by its name."""
    folder, _, base = name.rpartition("/")
    if base == "zarr.json":
        return Kind.ZARR
    if folder.startswith("arrays/"):
        return Kind.CHUNK
    if folder == "objects":
        return Kind.PACK
    if base.startswith("part-"):
        return Kind.PART
    return Kind(name)


def draw_flip(files: Files, chance: random.Random, number: int) -> Damage:
    """A byte: half of the times any of all files, else any of a kind, so that all are hit."""
    kind = None if chance.random() < 0.5 else chance.choice(list(Kind))  # noqa: PLR2004 - half
    name, at = _any_byte(files, kind, chance)
    change = bytes([chance.randrange(1, 256)])
    return Damage(number, Fault.FLIP, files.kind_at(name, at), (name,), at, change)


def draw_other(files: Files, chance: random.Random, number: int) -> Damage:
    """Any other fault, of a file of any kind."""
    fault = chance.choice([one for one in Fault if one is not Fault.FLIP])
    kind = chance.choice([one for one in Kind if one is not Kind.CHUNK_INDEX])
    name = chance.choice(files.by_kind[kind])
    if fault is Fault.TRUNCATE:
        return Damage(number, fault, kind, (name,), chance.randrange(len(files.contents[name])))
    if fault is Fault.EXTEND:
        more = chance.choice([b"\0", b" ", b"}", chance.randbytes(chance.randrange(1, 5000))])
        return Damage(number, fault, kind, (name,), 0, more)
    if fault is Fault.SWAP:
        is_like = chance.random() < 0.5 and len(files.by_kind[kind]) > 1  # noqa: PLR2004 - half
        others = files.by_kind[kind] if is_like else tuple(files.contents)
        other = chance.choice([one for one in others if one != name])
        return Damage(number, fault, kind, (name, other))
    return Damage(number, fault, kind, (name,))


def is_named(files: Files, damage: Damage, text: str) -> bool:
    """Whether an error says which file is damaged; of two that were swapped, one."""
    return any(str(files.root / name) in text for name in damage.names)


def _any_byte(files: Files, kind: Kind | None, chance: random.Random) -> tuple[str, int]:
    if kind is Kind.CHUNK_INDEX:
        name = chance.choice(files.by_kind[Kind.CHUNK])
        return name, chance.randrange(files.index_starts[name], len(files.contents[name]))
    names = tuple(files.contents) if kind is None else (chance.choice(files.by_kind[kind]),)
    number = chance.randrange(sum(len(files.contents[name]) for name in names))
    for name in names:
        if number < len(files.contents[name]):
            return name, number
        number -= len(files.contents[name])
    raise ValueError("a byte beyond the last one")


def _index_start(name: str, contents: Mapping[str, bytes]) -> int:
    metadata = json.loads(contents[f"{name.rpartition('/')[0]}/zarr.json"])
    chunk = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    inner = metadata["codecs"][0]["configuration"]["chunk_shape"]
    count: int = math.prod(c // i for c, i in zip(chunk, inner, strict=True))
    return len(contents[name]) - count * _INDEX_ENTRY_NBYTES - _CRC_NBYTES


def _overwrite(path: Path, byte_offset: int, content: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(byte_offset)
        file.write(content)
