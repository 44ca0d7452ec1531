"""Damage to the files of local checkpoints: what is hit, and what a load has to come to then.

The map of a file follows docs/local.md, not the code of the package: what the package calls
padding is not believed.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from benchmarks.faults.outcomes import Ending, Outcome
from dist_ckpt_strategies.local.scan import check_shard
from dist_ckpt_strategies.local.shard_format import LocalShardId

_ALIGNMENT = 64
_END = 32
_COPIES = "NoReplicasAvailableError"


class Scope(StrEnum):
    """Which copies are damaged."""

    ONE = "the copy that is read"
    BOTH = "both copies"
    ALL = "both copies, of both saves"


class Place(StrEnum):
    """What a byte of a file is."""

    LAST_BYTES = "digest, size and magic"
    DESCRIPTION = "description"
    TENSOR = "tensor"
    PADDING = "padding"
    END = "end cut off"


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file that are one thing."""

    start: int
    end: int
    place: Place


@dataclass(frozen=True, slots=True)
class Hit:
    """One byte that is changed, or the size that a file is cut to.

    Attributes:
        iteration: of the save.
        byte_offset: where.
        change: what the byte is XORed with; 0 to cut the file there.
    """

    iteration: int
    byte_offset: int
    change: int


@dataclass(frozen=True, slots=True)
class Damage:
    """One case.

    Attributes:
        number: of the case.
        scope: which copies.
        owner: the rank whose shard it is.
        place: what is hit.
        hits: one for each save that is hit.
    """

    number: int
    scope: Scope
    owner: int
    place: Place
    hits: tuple[Hit, ...]


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The files of two saves.

    Attributes:
        paths: of each shard, by iteration and owner; the copy that its owner reads comes first.
        spans: the map of each shard's files.
        contents: what each file has to hold.
        iterations: the two, the older first.
    """

    paths: Mapping[tuple[int, int], tuple[Path, ...]]
    spans: Mapping[tuple[int, int], tuple[Span, ...]]
    contents: Mapping[Path, bytes]
    iterations: tuple[int, int]

    @classmethod
    def below(cls, root: Path) -> Checkpoints:
        """What two saves have left."""
        paths: defaultdict[tuple[int, int], list[Path]] = defaultdict(list)
        for path in sorted(root.glob("node*/*/*.part")):
            shard_id = LocalShardId.require(path.stem)
            copies = paths[shard_id.save.iteration, shard_id.global_rank]
            is_own = path.parent.name == str(shard_id.global_rank)
            copies.insert(0 if is_own else len(copies), path)
        older, newer = sorted({iteration for iteration, _ in paths})
        return cls(
            {key: tuple(found) for key, found in paths.items()},
            {key: file_map(found[0].read_bytes()) for key, found in paths.items()},
            {path: path.read_bytes() for found in paths.values() for path in found},
            (older, newer),
        )

    def hit_paths(self, damage: Damage) -> list[tuple[Path, Hit]]:
        """The files that a case changes."""
        count = 1 if damage.scope is Scope.ONE else None
        return [
            (path, hit)
            for hit in damage.hits
            for path in self.paths[hit.iteration, damage.owner][:count]
        ]

    @contextmanager
    def damaged(self, damage: Damage) -> Iterator[None]:
        """Damage the files for the block."""
        hits = self.hit_paths(damage)
        try:
            for path, hit in hits:
                _apply(path, self.contents[path], hit)
            yield
        finally:
            for path, _ in hits:
                path.write_bytes(self.contents[path])


def draw_flip(saved: Checkpoints, chance: random.Random, number: int) -> Damage:
    """A byte: half of the times any of a file, else any of a kind, so that all kinds are hit."""
    scope, owner = chance.choice(list(Scope)), _any_owner(saved, chance)
    place: Place | None = None
    if chance.random() < 0.5:  # noqa: PLR2004 - half
        place = chance.choice([one for one in Place if one is not Place.END])
    hits = []
    for iteration in _iterations(saved, scope):
        spans = saved.spans[iteration, owner]
        offset = _any_byte(spans, place, chance)
        place = next(span.place for span in spans if span.start <= offset < span.end)
        hits.append(Hit(iteration, offset, chance.randrange(1, 256)))
    if place is None:
        raise ValueError("no save was hit")
    return Damage(number, scope, owner, place, tuple(hits))


def draw_cut(saved: Checkpoints, chance: random.Random, number: int) -> Damage:
    """A size that files are cut to, each save's its own."""
    scope, owner = chance.choice(list(Scope)), _any_owner(saved, chance)
    hits = tuple(
        Hit(iteration, chance.randrange(saved.spans[iteration, owner][-1].end), 0)
        for iteration in _iterations(saved, scope)
    )
    return Damage(number, scope, owner, Place.END, hits)


def is_detected(saved: Checkpoints, damage: Damage) -> list[bool]:
    """For each file that is hit, whether ``dist-ckpt verify`` says so."""
    return [
        any(True for _ in check_shard(path.parent, path.name))
        for path, _ in saved.hit_paths(damage)
    ]


def complaint(
    saved: Checkpoints, damage: Damage, found: Sequence[bool], outcomes: Sequence[Outcome]
) -> str | None:
    """What is wrong with what a case came to; None if nothing.

    Padding may change unseen, and nothing else: the other copy is used, else the save before,
    else every rank is refused for want of copies. Never is anything else returned than was saved.
    """
    is_padding = damage.place is Place.PADDING
    if any(one is is_padding for one in found):
        return f"a file with a change in its {damage.place} counts as " + (
            "damaged" if is_padding else "whole"
        )
    older, newer = saved.iterations
    if damage.scope is Scope.ALL and not is_padding:
        good = all(o.ending is Ending.REFUSED and o.text.startswith(_COPIES) for o in outcomes)
        return None if good else f"expected {_COPIES} on every rank, found {outcomes}"
    expected = older if damage.scope is Scope.BOTH and not is_padding else newer
    if any((o.ending, o.iteration) != (Ending.LOADED, expected) for o in outcomes):
        return f"expected iteration {expected} on every rank, found {outcomes}"
    return None


def file_map(content: bytes) -> tuple[Span, ...]:
    """What each byte of a shard's file is, by the table in docs/local.md."""
    last = len(content) - _END
    first = last - int.from_bytes(content[-16:-8], "little")
    end = 0
    spans = []
    for _, dtype, shape in json.loads(content[first:last])["buffers"]:
        nbytes = math.prod(shape) * getattr(torch, dtype).itemsize
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        spans += [Span(end, start, Place.PADDING), Span(start, start + nbytes, Place.TENSOR)]
        end = start + nbytes
    if end != first:
        raise ValueError(f"a shard whose buffers have {first} bytes is described as one of {end}")
    spans += [
        Span(first, last, Place.DESCRIPTION),
        Span(last, len(content), Place.LAST_BYTES),
    ]
    return tuple(span for span in spans if span.start < span.end)


def _any_owner(saved: Checkpoints, chance: random.Random) -> int:
    return chance.choice(sorted({owner for _, owner in saved.paths}))


def _iterations(saved: Checkpoints, scope: Scope) -> tuple[int, ...]:
    return saved.iterations if scope is Scope.ALL else saved.iterations[1:]


def _any_byte(spans: Sequence[Span], place: Place | None, chance: random.Random) -> int:
    chosen = [span for span in spans if place in {None, span.place}]
    number = chance.randrange(sum(span.end - span.start for span in chosen))
    for span in chosen:
        if number < span.end - span.start:
            return span.start + number
        number -= span.end - span.start
    raise ValueError("a byte beyond the last one")


def _apply(path: Path, content: bytes, hit: Hit) -> None:
    if hit.change == 0:
        os.truncate(path, hit.byte_offset)
        return
    with path.open("r+b", buffering=0) as file:
        file.seek(hit.byte_offset)
        file.write(bytes([content[hit.byte_offset] ^ hit.change]))
