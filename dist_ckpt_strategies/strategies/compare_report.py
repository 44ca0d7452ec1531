"""The report of ``compare``, of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from dist_ckpt_strategies.comm.base import Message
from dist_ckpt_strategies.megatron.types import ShardedTensor
from dist_ckpt_strategies.storage.files import COMMON_NAME
from dist_ckpt_strategies.tools.diff import ArrayDifference, Difference, ObjectDifference, merged

_MAX_LINES = 20
"""Of each kind in the text of a report."""


@dataclass(frozen=True, slots=True)
class CompareReport:
    """The differences between the states of all ranks and a checkpoint; equal on every rank.

    In differences ``a`` is what the checkpoint has, ``b`` what the state has.

    Attributes:
        checkpoint: its place.
        arrays: sorted by key; elements are counted on every rank that holds them.
        objects: sorted by key, the common state last.
        ranks: by the key of each difference the global ranks that found it; none for what no rank
            has.
        converted: arrays of another dtype in the checkpoint, whose values were converted before
            they were compared: key, the dtype stored, and that of the state.
        num_arrays: arrays that both have.
        num_objects: shards of objects that both have.
        nbytes: bytes of the elements that were compared, on all ranks.
        nbytes_read: of these, bytes that were read from the checkpoint.
    """

    checkpoint: str
    arrays: tuple[ArrayDifference, ...]
    objects: tuple[ObjectDifference, ...]
    ranks: Mapping[str, tuple[int, ...]]
    converted: tuple[tuple[str, str, str], ...]
    num_arrays: int
    num_objects: int
    nbytes: int
    nbytes_read: int

    @property
    def is_equal(self) -> bool:
        """Whether the state is that of the checkpoint, bit for bit, and nothing is missing."""
        return not self.arrays and not self.objects

    def __str__(self) -> str:
        """A line about the comparison, then one for each difference, some of each kind at most."""
        verb = "is" if self.is_equal else "is NOT"
        counts = f"{self.num_arrays} arrays, {self.num_objects} objects, {self.nbytes} bytes"
        lines = [f"the state {verb} that of {self.checkpoint}: {counts} compared"]
        if self.converted:
            key, stored, wanted = self.converted[0]
            lines[0] += f"; {len(self.converted)} converted, such as {key} ({stored} to {wanted})"
        arrays = [f"{one.key}: {_text_of(one)}{self._where(one.key)}" for one in self.arrays]
        objects = [
            f"{one.key}{one.where}: {one.a} in the checkpoint, {one.b} in the state"
            f"{self._where(one.key)}"
            for one in self.objects
        ]
        for kind in (arrays, objects):
            more = [f"and {len(kind) - _MAX_LINES} more"] if len(kind) > _MAX_LINES else []
            lines += [f"  {line}" for line in [*kind[:_MAX_LINES], *more]]
        return "\n".join(lines)

    def _where(self, key: str) -> str:
        ranks = self.ranks.get(key, ())
        shown = ", ".join(map(str, ranks[:_MAX_LINES])) + ", ..." * (len(ranks) > _MAX_LINES)
        return f" (rank {shown})" if ranks else ""


def _text_of(one: ArrayDifference) -> str:
    if one.difference is not Difference.VALUES:
        return f"{one.a} in the checkpoint, {one.b} in the state"
    largest = one.max_abs_difference
    apart = "" if largest is None else f", at most {largest:.3g} apart"
    first = f"first at {one.index}: {one.a} in the checkpoint, {one.b} in the state"
    return f"{one.num_differing} elements differ{apart}, {first}"


class Found(NamedTuple):
    """The findings of one rank: differences, conversions, bytes compared and bytes read."""

    arrays: Sequence[ArrayDifference] = ()
    objects: Sequence[ObjectDifference] = ()
    converted: Sequence[Sequence[str]] = ()
    nbytes: int = 0
    nbytes_read: int = 0

    def to_message(self) -> Message:
        """In JSON types; None if there is nothing to tell."""
        arrays, objects = (list(map(astuple, one)) for one in (self.arrays, self.objects))
        return [arrays, objects, list(self.converted), self.nbytes, self.nbytes_read]


def missing_from(absent: Iterable[str], keys: Collection[str]) -> Found:
    """Names of the checkpoint that no rank has; ``keys`` are those of arrays."""
    only = Difference.ONLY_IN_A
    arrays = [ArrayDifference(n, only, "an array", "nothing") for n in absent if n in keys]
    others = [n for n in absent if n not in keys]
    return Found(arrays, [ObjectDifference(n, only, "", "an object", "nothing") for n in others])


def unknown_of(values: Iterable[Any]) -> Found:
    """Sharded values of a state that the checkpoint does not have."""
    arrays: dict[str, ArrayDifference] = {}
    objects: list[ObjectDifference] = []
    for value in values:
        if isinstance(value, ShardedTensor):
            row = value.key, Difference.ONLY_IN_B, "nothing", "an array"
            arrays[value.key] = ArrayDifference(*row)
        else:
            place = value.unique_key, Difference.ONLY_IN_B, "", "nothing", "an object"
            objects.append(ObjectDifference(*place))
    return Found(list(arrays.values()), objects)


def report_of(
    checkpoint: str,
    global_ranks: Sequence[int],
    answers: Sequence[Message],
    missing: Found,
    num_arrays: int,
    num_objects: int,
) -> CompareReport:
    """The report of what all ranks have found, by rank, and of what is missing on either side."""
    arrays, objects = list(missing.arrays), {(o.key, o.where): o for o in missing.objects}
    ranks: dict[str, list[int]] = {}
    for rank, (rows, places, *_) in zip(global_ranks, answers, strict=True):
        for key, kind, a, b, index, num, largest, where in rows:
            values = index and tuple(index), num, largest, where and tuple(where)
            arrays.append(ArrayDifference(key, Difference(kind), a, b, *values))
        for key, kind, where, a, b in places:
            objects.setdefault((key, where), ObjectDifference(key, Difference(kind), where, a, b))
        for key in dict.fromkeys(key for key, *_ in [*rows, *places]):
            ranks.setdefault(key, []).append(rank)
    _, _, converted, nbytes, nbytes_read = zip(*answers, strict=True)
    return CompareReport(
        checkpoint,
        tuple(sorted(merged(arrays), key=lambda one: (one.key, one.difference))),
        tuple(sorted(objects.values(), key=lambda one: (one.key == COMMON_NAME, one.key))),
        {key: tuple(numbers) for key, numbers in ranks.items()},
        tuple(sorted({(key, stored, to) for rows in converted for key, stored, to in rows})),
        num_arrays,
        num_objects,
        sum(nbytes),
        sum(nbytes_read),
    )
