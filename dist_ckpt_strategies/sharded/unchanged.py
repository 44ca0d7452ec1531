"""Whether a save repeats what the save before has stored: by the digests that both have anyway.

Each rank compares the blocks that it writes with those of its last committed save, if these are the
same blocks. What it finds travels with the summary of what it has written, so that every rank comes
to the same verdict, before anything is committed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod

import numpy as np
import xxhash

from dist_ckpt_strategies.comm.base import Message
from dist_ckpt_strategies.config import OnUnchanged
from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.core.blocks import ArrayFacts, BlockTable, Column
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.formats.pack import RANGE_NBYTES, Digests, Layout, num_ranges

logger = logging.getLogger(__name__)

_SEPARATORS, _NO_LETTERS = re.compile(r"[^a-z0-9_]+"), re.compile(r"[^a-z]+")

_OF_OPTIMIZERS = ("optim", "exp_avg", "max_exp_avg", "momentum_buffer", "square_avg")
"""Begin words in keys of what an optimizer keeps for a weight."""

_OTHERS = frozenset(
    {"step", "lr", "running_mean", "running_var", "fp32_param", "param", "param_groups"}
)
"""Words in keys of arrays with rules of their own: counters, averages, second copies of weights."""


class _Kind(IntEnum):
    """Kind of an array, by its key, dtype and size."""

    WEIGHT = 0
    MOMENT = 1
    OTHER = 2


@dataclass(frozen=True, slots=True, eq=False)
class LastSave:
    """One rank's digests of a save, to compare the next one with.

    Attributes:
        place: of the checkpoint.
        table: the blocks of arrays that this rank has written.
        digests: of their ranges, block by block.
        others: a digest of its objects and the common state.
        has_trained: whether a weight of any rank has ever changed from one save to the next.
    """

    place: str
    table: BlockTable
    digests: Digests
    others: int
    has_trained: bool = False


def described_save(place: object, layout: Layout, digests: Sequence[Digests]) -> LastSave:
    """The LastSave of a rank, from the digests of its packs."""
    table, joined = layout.table, np.concatenate(digests)
    starts = np.cumsum([0, *map(len, digests)])
    counts = _num_ranges(table)
    first = starts[table.place[:, 0]] + table.place[:, 2] - (np.cumsum(counts) - counts)
    ordered = joined[np.repeat(first, counts) + np.arange(counts.sum())]
    others = xxhash.xxh3_64()
    for where in [*(where for _, where in layout.objects), *filter(None, [layout.common])]:
        at = starts[where.pack] + where.first_range
        others.update(joined[at : at + num_ranges(where.nbytes)].tobytes())
    return LastSave(str(place), table, ordered, others.intdigest())


def _num_ranges(table: BlockTable) -> Column:
    return -(-table.nbytes // RANGE_NBYTES)


def _kind(key: str, facts: ArrayFacts) -> _Kind:
    words = _SEPARATORS.split(key.lower())
    is_average = "ema" in _NO_LETTERS.split(key.lower())  # ema_model, model_ema
    if prod(facts.shape) <= 1 or is_average or not _OTHERS.isdisjoint(words):
        return _Kind.OTHER
    if any(word.startswith(_OF_OPTIMIZERS) for word in words):
        return _Kind.MOMENT
    is_number = facts.dtype.startswith(("float", "bfloat", "complex"))
    return _Kind.WEIGHT if is_number else _Kind.OTHER


def compared(last: LastSave | None, now: LastSave, on_unchanged: str) -> Message:
    """A rank's comparison of a save with its last one; None if they cannot be compared."""
    if last is None or not _same_blocks(last.table, now.table):
        return None
    table = now.table
    rows = np.repeat(np.arange(len(table)), _num_ranges(table))
    has_changed = np.bincount(rows, last.digests != now.digests, minlength=len(table)) > 0
    is_first = (table.origin == 0).all(axis=1)  # of one block of each array, on whichever rank
    sizes = [prod(f.shape) * DType(f.dtype).itemsize for f in table.facts]
    kinds = np.array(list(map(_kind, table.keys, table.facts)), np.int64)[table.array]
    told = []
    for kind in (_Kind.WEIGHT, _Kind.MOMENT):
        is_counted, is_changed = (kinds == kind) & is_first, (kinds == kind) & has_changed
        still = table.array[is_counted & ~has_changed].tolist()
        largest = max(((sizes[n], table.keys[n]) for n in still), default=(0, ""))
        told.append([int(is_counted.sum()), len(still), bool(is_changed.any()), largest])
    has_others = last.others != now.others
    return [last.place, now.place, last.has_trained, has_others, on_unchanged, *told]


def _same_blocks(one: BlockTable, other: BlockTable) -> bool:
    return one is other or (
        (one.keys, one.facts) == (other.keys, other.facts)
        and np.array_equal(one.array, other.array)
        and np.array_equal(one.origin, other.origin)
        and np.array_equal(one.extent, other.extent)
    )


def judged(told: Sequence[Message], *, is_first: bool) -> bool:
    """Whether a weight has changed since the save before, or between earlier ones.

    The first rank logs a warning if the save repeats the last one. Every rank comes to the same
    verdict, by nothing but what all that write have ``told``: what ``compared`` has returned.

    Raises:
        PlanError: the save repeats the last one, and the option of a rank says so; on every rank.
    """
    if None in told or not told:
        return False  # not comparable
    befores, places, trained, others, options, *kinds = zip(*told, strict=True)
    before, place, (weights, moments) = befores[0], places[0], map(_Sum.of, kinds)
    if not _is_another_step(before, place, has_changed=any(others)):
        return any(trained)  # as of two models that are saved at one step
    text = _repeated(place, before, weights, moments, has_trained=any(trained))
    if text and OnUnchanged.RAISE in options:
        raise PlanError(f"{text}; nothing was committed")
    if text and is_first and OnUnchanged.WARN in options:
        logger.warning("%s", text)
    return any(trained) or weights.has_changed


@dataclass(frozen=True, slots=True)
class _Sum:
    """Arrays of one kind on all ranks: how many, how many are unchanged, the largest of these."""

    num: int
    num_still: int
    has_changed: bool
    largest: tuple[int, str]

    @classmethod
    def of(cls, told: Sequence[Message]) -> _Sum:
        num, still, changed, largest = zip(*told, strict=True)
        return cls(sum(num), sum(still), any(changed), max(map(tuple, largest)))

    @property
    def is_still(self) -> bool:
        return self.num > 0 and not self.has_changed


def _repeated(place: str, before: str, weights: _Sum, moments: _Sum, *, has_trained: bool) -> str:
    """Describes how a save repeats the one before; empty if it does not.

    Weights that stand still count only after they have moved: before that they may be frozen, or
    the learning rate of the warm-up 0.
    """
    if moments.is_still and weights.has_changed:
        why = "the weights have changed, so these moments are not of the optimizer that runs"
    elif moments.is_still:
        why = "no update was applied since, or an old copy of the state is saved"
    elif weights.is_still and has_trained:
        why = "weights changed before: an old copy of them is saved, or the learning rate is low"
    else:
        return ""
    nbytes, key = max(weights.largest, moments.largest)
    return (
        f"{place}: unchanged since {before}: {weights.num_still} of {weights.num} model arrays, "
        f"{moments.num_still} of {moments.num} optimizer arrays, the largest {key} of {nbytes} "
        f"bytes; {why}; on_unchanged='ignore' if that is meant"
    )


def _is_another_step(before: str, place: str, *, has_changed: bool) -> bool:
    """Whether places are of different steps: by numbers, where they differ in nothing else.

    Where they do, as ``iter_20`` and ``final``, or a name has none, by whether objects or the
    common state have changed.
    """
    one, other = (re.findall(r"\d+", text)[-1:] for text in (before, place))
    if one == other:
        is_numbered = any(char.isdecimal() for char in place.rpartition("/")[2])
        return has_changed and not is_numbered
    return has_changed or re.sub(r"\d+", "", before) == re.sub(r"\d+", "", place)
