"""Comparison of two checkpoints of any formats: keys, shapes, dtypes, elements, objects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_ckpt_strategies.comm.shared_work import Count, Ranks, Watch
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, Region, Shape
from dist_ckpt_strategies.errors import ArrayNotFoundError, raises_megatron_errors
from dist_ckpt_strategies.formats.objects import Allowed, load_content
from dist_ckpt_strategies.formats.pack import Digests
from dist_ckpt_strategies.storage.files import COMMON_NAME
from dist_ckpt_strategies.storage.store import ArrayRead, HostArray
from dist_ckpt_strategies.tools.opened import OpenedCheckpoint
from dist_ckpt_strategies.tools.options import ConvertOptions
from dist_ckpt_strategies.tools.plan_convert import blocks
from dist_ckpt_strategies.tools.rescue import find_readable, tried
from dist_ckpt_strategies.tools.upgrade import renamed_keys, upgraded_common
from dist_ckpt_strategies.tools.writers import Memory, bytes_of

if TYPE_CHECKING:  # torch takes a while to import
    from dist_ckpt_strategies.comm.base import Communicator

MAX_PLACES = 100
_LARGE_INTEGER_NBYTES = 8


class Difference(StrEnum):
    """In what two checkpoints differ; the values are part of the command's JSON."""

    ONLY_IN_A = "only_in_a"
    ONLY_IN_B = "only_in_b"
    SHAPE = "shape"
    DTYPE = "dtype"
    VALUES = "values"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class ArrayDifference:
    """One array that is not the same in both.

    Attributes:
        key: its name, in the first checkpoint that has it.
        difference: in what; an array that is damaged may differ in values, too.
        a: what the first checkpoint has: a shape, a dtype, or the first element that differs; of a
            damaged one why it cannot be read, or nothing.
        b: what the second has.
        index: of the first element that differs, in C order.
        num_differing: elements that differ in a bit.
        max_abs_difference: of the elements that differ; None where all of those are NaN in one.
        max_index: of the element that differs so much.
    """

    key: str
    difference: Difference
    a: str
    b: str
    index: Shape | None = None
    num_differing: int = 0
    max_abs_difference: float | None = None
    max_index: Shape | None = None


@dataclass(frozen=True, slots=True)
class ObjectDifference:
    """One place in an object, or in the common state, that is not the same in both.

    Attributes:
        key: unique key of the object's shard; ``common.pt`` for the common state.
        difference: in what.
        where: within the object, such as ``['args'].lr``.
        a: what the first checkpoint has, in short.
        b: what the second has.
    """

    key: str
    difference: Difference
    where: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The differences between two checkpoints.

    Attributes:
        arrays: sorted by key.
        objects: sorted by key, the common state last.
        num_arrays: arrays that both have.
        num_objects: shards of objects that both have.
        nbytes: bytes of the elements that were compared, of one of them, or their digests.
        num_renamed: of the arrays, those that one of them has under the name that ``upgrade`` gives
            them; then the common state is compared as ``upgrade`` writes it, too.
    """

    arrays: tuple[ArrayDifference, ...]
    objects: tuple[ObjectDifference, ...]
    num_arrays: int
    num_objects: int
    nbytes: int
    num_renamed: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether they hold the same, bit for bit."""
        return not self.arrays and not self.objects


@raises_megatron_errors
def diff(  # noqa: PLR0913
    a: str | Path,
    b: str | Path,
    *,
    keys: str | None = None,
    values: bool = False,
    allow: Allowed = (),
    options: ConvertOptions | None = None,
    watch: Watch | None = None,
    comm: Communicator | None = None,
) -> DiffReport:
    """Compare two checkpoints bit for bit, in bounded memory.

    Stored blocks of packs that are of the same region in both are compared by their digests, and
    read only if these differ; ``dist-ckpt verify`` compares the bytes with them. What is damaged
    counts as a difference, and the comparison goes on.

    Collective if ``comm`` has several ranks: each compares its share of the elements, all return
    the same report, and a failure on one rank is raised on all.

    Args:
        a: a finished checkpoint: what ``dist_ckpt_strategies.open`` reads.
        b: another one.
        keys: compare only arrays whose keys match this glob, and no objects.
        values: compare arrays of different dtypes too, by what their elements are as numbers.
        allow: further classes that objects and the common state may be unpickled to.
        options: memory and threads of each process.
        watch: called from time to time with the bytes of one side, done and in total.
        comm: ranks that share the work; see ``convert``.

    Raises:
        ArrayNotFoundError: no key in either of them matches.
        StorageError: one of them is missing, cannot be read, or has a damaged index.
        UnsafeObjectError: an object that differs needs a class that is not allowed.
    """
    ranks, chosen = Ranks(comm), options or ConvertOptions()
    opened = ranks.run(lambda: [chosen.open(name, allow) for name in (a, b)])
    return _Comparison(ranks, chosen, *opened).run(keys, watch, with_dtypes=values)


Pair = tuple[ArraySpec, ArraySpec]
"""An array as both have it, with the same shape and dtype."""

PairedRegion = tuple[ArraySpec, ArraySpec, Region]
"""A region of such an array."""

_MAX_TOGETHER = 256
"""Regions that are read by one call: it takes 2 ms, whatever it reads."""


class _Comparison:
    """Two opened checkpoints, on all ranks that compare them."""

    def __init__(
        self, ranks: Ranks, options: ConvertOptions, a: OpenedCheckpoint, b: OpenedCheckpoint
    ) -> None:
        self._ranks, self._options, self._a, self._b = ranks, options, a, b
        self._memory = Memory()

    def run(self, keys: str | None, watch: Watch | None, *, with_dtypes: bool) -> DiffReport:
        """Compare the keys, then the elements, then the objects. Collective."""
        pairs, differences, num_renamed = self._ranks.run(
            lambda: self._unchanged(lambda: self._paired(keys))
        )
        misfits = [_misfit(*pair) for pair in pairs]
        same = [
            pair
            for pair, misfit in zip(pairs, misfits, strict=True)
            if misfit is None or (with_dtypes and misfit.difference is Difference.DTYPE)
        ]
        differences += filter(None, misfits)
        differences += self._compared(same, watch)
        differences.sort(key=lambda difference: (difference.key, difference.difference))
        objects: list[ObjectDifference] = []
        num_objects = 0
        if keys is None:
            is_upgraded = num_renamed > 0
            objects = self._ranks.run_on_first(
                lambda: self._unchanged(lambda: [*self._objects(is_upgraded)])
            )
            num_objects = len({*self._a.object_ids} & {*self._b.object_ids})
        return DiffReport(
            tuple(differences),
            tuple(objects),
            len(pairs),
            num_objects,
            sum(one.nbytes for one, _ in same),
            num_renamed,
        )

    def _unchanged(self, step: Callable[[], Any]) -> Any:
        """The result of a step that reads both; a StorageError if a save has replaced one."""
        return self._a.unchanged(lambda: self._b.unchanged(step))

    def _paired(self, keys: str | None) -> tuple[list[Pair], list[ArrayDifference], int]:
        """The arrays that both have, what others differ in, and how many have two names."""
        sides = [
            [key for key in opened if keys is None or fnmatchcase(key, keys)]
            for opened in (self._a, self._b)
        ]
        if keys is not None and not any(sides):  # nothing compared would be called equal
            roots = f"{self._a.root} and {self._b.root}"
            raise ArrayNotFoundError(f"{roots}: no array's key matches {keys!r}")
        (mine, lost), (theirs, also_lost) = (
            find_readable(opened, keys_of)
            for opened, keys_of in zip((self._a, self._b), sides, strict=True)
        )
        differences = [ArrayDifference(k, Difference.DAMAGED, why, "") for k, why in lost.items()]
        for key, why in also_lost.items():
            differences.append(ArrayDifference(key, Difference.DAMAGED, "", why))
        names = renamed_keys(*sides)
        others = {array.key: array for array in theirs}
        pairs = []
        for array in mine:
            name = names.get(array.key, array.key)
            if name in others:
                pairs.append((array, others.pop(name)))
            elif name not in also_lost:
                differences.append(_single(array, Difference.ONLY_IN_A))
        lost_names = {names.get(key, key) for key in lost}
        others = {key: array for key, array in others.items() if key not in lost_names}
        differences += [_single(array, Difference.ONLY_IN_B) for array in others.values()]
        return pairs, differences, len(names)

    def _compared(self, pairs: Sequence[Pair], watch: Watch | None) -> Iterable[ArrayDifference]:
        """The differences of arrays that both have in one shape and dtype. Collective.

        Stored regions of the first checkpoint, small ones together, are what ranks and threads take
        in turn.
        """

        def tasks() -> list[list[PairedRegion]]:
            mine = self._a.stored.digests([one.key for one, _ in pairs])
            theirs = self._b.stored.digests([other.key for _, other in pairs]) if mine else {}
            regions = (
                (one, other, region)
                for one, other in pairs
                if one.nbytes
                for region in one.regions()
                if one.dtype is not other.dtype
                or not _same(mine.get((one.key, region)), theirs.get((other.key, region)))
            )
            return _batches(regions, self._options.block_nbytes)

        results = self._ranks.share(
            self._ranks.run(lambda: self._unchanged(tasks)),
            lambda batch: sum(region.numel * one.dtype.itemsize for one, _, region in batch),
            lambda batch, count: self._unchanged(lambda: [*merged(self._values(batch, count))]),
            num_threads=self._options.threads,
            watch=watch,
        )
        mine = list(merged(chain.from_iterable(results.values())))
        return merged(chain.from_iterable(self._ranks.gather(lambda: mine)))

    def _values(self, batch: Sequence[PairedRegion], count: Count) -> Iterator[ArrayDifference]:
        """The differences in some regions."""
        if len(batch) > 1:
            mine = self._memory.arrays([(r.shape, one.dtype) for one, _, r in batch], "a")
            theirs = self._memory.arrays([(r.shape, other.dtype) for _, other, r in batch], "b")
            reads = (
                [ArrayRead(one, r, to) for (one, _, r), to in zip(batch, mine, strict=True)],
                [ArrayRead(other, r, to) for (_, other, r), to in zip(batch, theirs, strict=True)],
            )
            _, a = tried(partial(self._a.read_into, *reads[0]))
            _, b = tried(partial(self._b.read_into, *reads[1]))
            if not (a or b):
                for paired, elements, others in zip(batch, mine, theirs, strict=True):
                    count(elements.nbytes)
                    yield from _differing(*paired, elements, others)
                return
        for one, other, region in batch:  # which of them is damaged
            itemsize = one.dtype.itemsize
            if one.dtype is not other.dtype:  # compared in larger ones
                itemsize = 4 * max(itemsize, other.dtype.itemsize)
            for block in blocks(region, itemsize, self._options.block_nbytes):
                elements = self._memory.array(block.shape, one.dtype, "a")
                others = self._memory.array(block.shape, other.dtype, "b")
                _, a = tried(partial(self._a.read_into, ArrayRead(one, block, elements)))
                _, b = tried(partial(self._b.read_into, ArrayRead(other, block, others)))
                count(elements.nbytes)
                if a or b:
                    yield ArrayDifference(one.key, Difference.DAMAGED, a, b)
                else:
                    yield from _differing(one, other, block, elements, others)

    def _objects(self, is_upgraded: bool) -> Iterator[ObjectDifference]:  # noqa: FBT001
        mine, theirs = set(self._a.object_ids), set(self._b.object_ids)
        for object_id in sorted(mine | theirs):
            key = object_id.unique_key
            if object_id not in theirs:
                yield ObjectDifference(key, Difference.ONLY_IN_A, "", "an object", "nothing")
            elif object_id not in mine:
                yield ObjectDifference(key, Difference.ONLY_IN_B, "", "nothing", "an object")
            else:
                yield from self._contents(key, object_id)
        yield from self._contents(COMMON_NAME, None, is_upgraded=is_upgraded)

    def _contents(
        self, key: str, object_id: ObjectId | None, *, is_upgraded: bool = False
    ) -> Iterator[ObjectDifference]:
        """The differences of an object, or of the common state."""

        def read(opened: OpenedCheckpoint) -> bytes:
            return opened.object_content(object_id) if object_id else opened.common_content()

        sides = (self._a, self._b)
        (mine, a), (theirs, b) = (tried(partial(read, opened)) for opened in sides)
        if mine is None or theirs is None:
            yield ObjectDifference(key, Difference.DAMAGED, "", a, b)
        elif mine != theirs:
            from dist_ckpt_strategies.tools.diff_values import differing_places  # noqa: PLC0415 - torch

            values = []
            for opened, stored in ((self._a, mine), (self._b, theirs)):
                path, allow = f"{opened.root}/{key}", opened.allowed
                content = (
                    upgraded_common(stored, path, allow, is_required=False)
                    if is_upgraded
                    else stored
                )
                values.append(load_content(content, path, key, allow))
            for place in islice(differing_places(*values), MAX_PLACES):
                yield ObjectDifference(key, Difference.VALUES, *place)


def _batches(regions: Iterable[PairedRegion], max_nbytes: int) -> list[list[PairedRegion]]:
    """The regions in their order, as many together as have so many bytes in either checkpoint."""
    batches: list[list[PairedRegion]] = []
    left = 0
    for one, other, region in regions:
        nbytes = region.numel * max(one.dtype.itemsize, other.dtype.itemsize)
        if left < nbytes or len(batches[-1]) == _MAX_TOGETHER:
            batches.append([])
            left = max_nbytes
        batches[-1].append((one, other, region))
        left -= nbytes
    return batches


def _differing(
    one: ArraySpec, other: ArraySpec, region: Region, mine: HostArray, theirs: HostArray
) -> Iterator[ArrayDifference]:
    """The difference of the elements in a region, if any."""
    if one.dtype is not other.dtype or not is_equal(mine, theirs):
        difference = element_difference(one.key, region, mine, theirs)
        if difference.num_differing:
            yield difference


def _same(one: Digests | None, other: Digests | None) -> bool:
    return one is not None and other is not None and np.array_equal(one, other)


def is_equal(one: HostArray, other: HostArray) -> bool:
    """Whether the elements of two arrays of one shape and dtype are the same, bit for bit."""
    mine, theirs = bytes_of(one), bytes_of(other)
    if mine.size % 8 == 0:
        mine, theirs = mine.view(np.uint64), theirs.view(np.uint64)
    return np.array_equal(mine, theirs)


def merged(differences: Iterable[ArrayDifference]) -> Collection[ArrayDifference]:
    """One for each array and kind, out of the differences of its regions."""
    merged: dict[tuple[str, str], ArrayDifference] = {}
    for other in differences:
        place = other.key, other.difference
        one = merged.setdefault(place, other)
        if one is not other:
            by_size = sorted((one, other), key=lambda d: d.max_abs_difference or -1.0)
            merged[place] = replace(
                min(one, other, key=lambda d: d.index or ()),
                num_differing=one.num_differing + other.num_differing,
                max_abs_difference=by_size[1].max_abs_difference,
                max_index=by_size[1].max_index,
            )
    return merged.values()


def _single(array: ArraySpec, difference: Difference) -> ArrayDifference:
    """An array that one of them has."""
    text, is_first = f"{array.dtype.value} {array.shape}", difference is Difference.ONLY_IN_A
    a, b = (text, "nothing") if is_first else ("nothing", text)
    return ArrayDifference(array.key, difference, a, b)


def _misfit(one: ArraySpec, other: ArraySpec) -> ArrayDifference | None:
    """The difference in shape or dtype, which keeps elements from being compared; or None."""
    if one.shape != other.shape:
        return ArrayDifference(one.key, Difference.SHAPE, str(one.shape), str(other.shape))
    if one.dtype is not other.dtype:
        return ArrayDifference(one.key, Difference.DTYPE, one.dtype.value, other.dtype.value)
    return None


def element_difference(
    key: str, block: Region, one: HostArray, other: HostArray
) -> ArrayDifference:
    """The difference of a block: elements of one dtype in a bit, of two dtypes as numbers."""
    kinds, sizes = {one.dtype.kind, other.dtype.kind}, {one.dtype.itemsize, other.dtype.itemsize}
    is_wide = kinds <= {*"iu"} and _LARGE_INTEGER_NBYTES in sizes
    wide: Any = np.complex128 if "c" in kinds else np.longdouble if is_wide else np.float64
    if one.dtype == other.dtype:
        is_other = (bytes_of(one) != bytes_of(other)).reshape(one.size, -1).any(axis=1)
    else:
        mine, others = one.reshape(-1).astype(wide), other.reshape(-1).astype(wide)
        is_other = (mine != others) & ~(np.isnan(mine) & np.isnan(others))
    places = np.flatnonzero(is_other)
    if not places.size:
        return ArrayDifference(key, Difference.VALUES, "", "")
    mine, others = one.reshape(-1)[places], other.reshape(-1)[places]
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(mine.astype(wide) - others.astype(wide))
    largest, where = None, None
    if not np.isnan(apart).all():
        at = int(np.nanargmax(apart))
        largest, where = float(apart[at]), _index(block, places[at])
    first = _index(block, places[0]), int(places.size)
    return ArrayDifference(
        key, Difference.VALUES, str(mine[0]), str(others[0]), *first, largest, where
    )


def _index(block: Region, place: int) -> Shape:
    """Indices in an array of an element of a block, counted in C order."""
    at = np.unravel_index(place, block.shape) if block.shape else ()
    return tuple(int(o + p) for o, p in zip(block.offset, at, strict=True))
