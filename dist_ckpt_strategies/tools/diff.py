"""How two checkpoints of any formats differ: keys, shapes, dtypes, every element, every object."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.shared_work import Count, Ranks
from dist_ckpt_strategies.core.array import Region, Shape
from dist_ckpt_strategies.errors import ArrayNotFoundError
from dist_ckpt_strategies.formats.issues import Watch
from dist_ckpt_strategies.formats.objects import Allowed, load_content
from dist_ckpt_strategies.megatron.types import default_allowed, raises_megatron_errors
from dist_ckpt_strategies.storage.files import COMMON_NAME
from dist_ckpt_strategies.storage.store import HostArray
from dist_ckpt_strategies.tools.convert import ConvertOptions
from dist_ckpt_strategies.tools.plan_convert import (
    SourceArray,
    blocks,
    chunk_grid,
    stored_regions,
)
from dist_ckpt_strategies.tools.readers import CheckpointReader, Memory

_MAX_TEXT = 120
_MAX_PLACES = 100
_LARGE_INTEGER_NBYTES = 8


class Difference(StrEnum):
    """In what two checkpoints differ; the values are part of the command's JSON."""

    ONLY_IN_A = "only_in_a"
    ONLY_IN_B = "only_in_b"
    SHAPE = "shape"
    DTYPE = "dtype"
    VALUES = "values"


@dataclass(frozen=True, slots=True)
class ArrayDifference:
    """One array that is not the same in both.

    Attributes:
        key: its name.
        difference: in what.
        a: what the first checkpoint has: a shape, a dtype, or the first element that differs.
        b: what the second has.
        index: of the first element that differs, in C order.
        num_differing: elements that differ in a bit.
        max_abs_difference: of the elements that differ; None where all of those are NaN in one.
    """

    key: str
    difference: Difference
    a: str
    b: str
    index: Shape | None = None
    num_differing: int = 0
    max_abs_difference: float | None = None


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
    """How two checkpoints differ.

    Attributes:
        arrays: sorted by key.
        objects: sorted by key, the common state last.
        num_arrays: arrays that both have.
        num_objects: shards of objects that both have.
        nbytes: bytes of the elements that were compared, of one of them.
    """

    arrays: tuple[ArrayDifference, ...]
    objects: tuple[ObjectDifference, ...]
    num_arrays: int
    num_objects: int
    nbytes: int

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
    allow: Allowed = (),
    options: ConvertOptions | None = None,
    watch: Watch | None = None,
    comm: Communicator | None = None,
) -> DiffReport:
    """Compare two checkpoints bit for bit, in bounded memory.

    Collective if ``comm`` has several ranks: each compares its share of the elements, all return
    the same report, and a failure on one rank is raised on all.

    Args:
        a: directory of a finished checkpoint: ("zarr", 1), ("zarr", 2) or torch_dist. Of
            ("zarr", 2) also its URL.
        b: another one.
        keys: compare only arrays whose keys match this glob, and no objects.
        allow: further classes that objects and the common state may be unpickled to.
        options: memory and threads of each process.
        watch: called with bytes of one of them, done and in all, now and then.
        comm: ranks that share the work; see ``convert``.

    Raises:
        ArrayNotFoundError: no key in either of them matches.
        StorageError: one of them is missing or damaged.
        UnsafeObjectError: an object that differs needs a class that is not allowed.
    """
    comparison = _Comparison(options or ConvertOptions(), allow, Ranks(comm))
    return comparison.run(a, b, keys, watch)


class _Comparison:
    """One comparison, on all ranks of a communicator."""

    def __init__(self, options: ConvertOptions, allow: Allowed, ranks: Ranks) -> None:
        self._options, self._ranks = options, ranks
        self._allow = [*default_allowed(), *allow]
        self._memory = Memory()

    def run(
        self, a: str | Path, b: str | Path, keys: str | None, watch: Watch | None
    ) -> DiffReport:
        """Compare the keys, then the elements, then the objects. Collective."""
        mine, theirs = self._ranks.run(lambda: self._open(a, b, keys))
        pairs = {key: (mine[key], theirs[key]) for key in sorted(mine.keys() & theirs.keys())}
        found = [_only(mine[key], Difference.ONLY_IN_A) for key in mine.keys() - theirs.keys()]
        found += [_only(theirs[key], Difference.ONLY_IN_B) for key in theirs.keys() - mine.keys()]
        misfits = {key: _misfit(*pair) for key, pair in pairs.items()}
        found += filter(None, misfits.values())
        same = [pair[0] for key, pair in pairs.items() if misfits[key] is None]
        found += self._compared(same, watch)
        by_key = tuple(sorted(found, key=lambda difference: difference.key))
        total = sum(array.nbytes for array in same)
        if keys is not None:
            return DiffReport(by_key, (), len(pairs), 0, total)

        def objects() -> tuple[int, list[Any]]:
            found = _objects(self._a, self._b, self._allow)
            return len({*self._a.objects} & {*self._b.objects}), list(map(astuple, found))

        num_objects, of_objects = self._ranks.run_on_first(objects)
        differing = (
            ObjectDifference(key, Difference(difference), *rest)
            for key, difference, *rest in of_objects
        )
        return DiffReport(by_key, tuple(differing), len(pairs), num_objects, total)

    def _open(self, a: str | Path, b: str | Path, keys: str | None) -> list[dict[str, SourceArray]]:
        """Open both; returns the arrays to compare, each known to be whole."""
        self._a, self._b = (self._options.open(name, self._allow) for name in (a, b))
        found = [
            {one.key: one for one in reader.arrays if keys is None or fnmatchcase(one.key, keys)}
            for reader in (self._a, self._b)
        ]
        if keys is not None and not any(found):  # nothing compared would be called equal
            roots = f"{self._a.root} and {self._b.root}"
            raise ArrayNotFoundError(f"{roots}: no array's key matches {keys!r}")
        for array in chain.from_iterable(of_one.values() for of_one in found):
            chunk_grid(array)  # raises where shards are missing
        return found

    def _compared(
        self, arrays: Sequence[SourceArray], watch: Watch | None
    ) -> Iterable[ArrayDifference]:
        """How arrays that both have in one shape and dtype differ. Collective.

        The stored regions of the first checkpoint are what ranks and threads take in turn.
        """
        tasks = [
            (array, region) for array in arrays if array.nbytes for region in stored_regions(array)
        ]
        results = self._ranks.share(
            tasks,
            lambda task: task[1].numel * task[0].dtype.itemsize,
            lambda task, count: self._values(*task, count),
            num_threads=self._options.threads,
            watch=watch,
        )
        own: dict[str, ArrayDifference] = {}
        for found in filter(None, results.values()):
            own[found.key] = _merged(own.get(found.key), found)
        merged: dict[str, ArrayDifference] = {}
        for of_rank in self._ranks.gather(lambda: list(map(astuple, own.values()))):
            for key, difference, a, b, index, *rest in of_rank:
                one = ArrayDifference(key, Difference(difference), a, b, tuple(index), *rest)
                merged[key] = _merged(merged.get(key), one)
        return merged.values()

    def _values(self, array: SourceArray, region: Region, count: Count) -> ArrayDifference | None:
        """How a region differs; None where it does not."""
        found: ArrayDifference | None = None
        itemsize, limit = array.dtype.itemsize, self._options.block_nbytes
        for block in blocks(region, itemsize, limit, array.granularity):
            one = self._memory.array(block.shape, array.dtype, "a")
            other = self._memory.array(block.shape, array.dtype, "b")
            self._a.read(array.key, block, one)
            self._b.read(array.key, block, other)
            count(block.numel * itemsize)
            if not _are_equal(one, other):
                found = _merged(found, _difference(array.key, block, one, other))
        return found


def _merged(one: ArrayDifference | None, other: ArrayDifference) -> ArrayDifference:
    """What two differences of one array's values are together."""
    if one is None:
        return other
    first = min(one, other, key=lambda found: found.index or ())
    largest = (one.max_abs_difference, other.max_abs_difference)
    return replace(
        first,
        num_differing=one.num_differing + other.num_differing,
        max_abs_difference=max((found for found in largest if found is not None), default=None),
    )


def _only(array: SourceArray, difference: Difference) -> ArrayDifference:
    texts = [f"{array.dtype.value} {array.shape}", "nothing"]
    one, other = texts if difference is Difference.ONLY_IN_A else reversed(texts)
    return ArrayDifference(array.key, difference, one, other)


def _misfit(one: SourceArray, other: SourceArray) -> ArrayDifference | None:
    if one.shape != other.shape:
        return ArrayDifference(one.key, Difference.SHAPE, str(one.shape), str(other.shape))
    if one.dtype is not other.dtype:
        return ArrayDifference(one.key, Difference.DTYPE, one.dtype.value, other.dtype.value)
    return None


def _are_equal(one: HostArray, other: HostArray) -> bool:
    mine, theirs = one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8)
    if mine.size % 8 == 0:
        mine, theirs = mine.view(np.uint64), theirs.view(np.uint64)
    return bool(np.array_equal(mine, theirs))


def _difference(key: str, block: Region, one: HostArray, other: HostArray) -> ArrayDifference:
    """How the elements of a block differ, of which at least one does."""
    mine, theirs = one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8)
    places = np.flatnonzero((mine != theirs).reshape(one.size, -1).any(axis=1))
    own, others = one.reshape(-1)[places], other.reshape(-1)[places]
    at = np.unravel_index(places[0], block.shape) if block.shape else ()
    index = tuple(int(o + p) for o, p in zip(block.offset, at, strict=True))
    is_wide = one.dtype.kind in "iu" and one.dtype.itemsize == _LARGE_INTEGER_NBYTES
    wide: Any = np.complex128 if one.dtype.kind == "c" else np.longdouble if is_wide else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(own.astype(wide) - others.astype(wide))
    numbers = apart[~np.isnan(apart)]
    largest = float(numbers.max()) if numbers.size else None
    texts = str(own[0]), str(others[0])
    return ArrayDifference(key, Difference.VALUES, *texts, index, int(places.size), largest)


def _objects(
    a: CheckpointReader, b: CheckpointReader, allow: Allowed
) -> Iterator[ObjectDifference]:
    mine, theirs = set(a.objects), set(b.objects)
    for object_id in sorted(mine | theirs):
        key = object_id.unique_key
        if object_id not in theirs:
            yield ObjectDifference(key, Difference.ONLY_IN_A, "", "an object", "nothing")
        elif object_id not in mine:
            yield ObjectDifference(key, Difference.ONLY_IN_B, "", "nothing", "an object")
        else:
            contents = a.object_content(object_id), b.object_content(object_id)
            yield from _contents(key, *contents, (str(a.root), str(b.root)), allow)
    paths = (f"{a.root}/{COMMON_NAME}", f"{b.root}/{COMMON_NAME}")
    yield from _contents(COMMON_NAME, a.common_content(), b.common_content(), paths, allow)


def _contents(
    key: str, a: bytes, b: bytes, paths: tuple[str, str], allow: Allowed
) -> Iterator[ObjectDifference]:
    if a != b:
        values = [
            load_content(one, path, key, allow) for one, path in zip((a, b), paths, strict=True)
        ]
        for found in islice(differing_places(*values), _MAX_PLACES):
            yield ObjectDifference(key, Difference.VALUES, *found)


def differing_places(a: Any, b: Any, where: str = "") -> Iterator[tuple[str, str, str]]:
    """Each place at which two values are not the same, and what is there in short."""
    is_list = isinstance(a, (list, tuple))
    if type(a) is type(b) and is_list and len(a) != len(b):
        yield where, f"{len(a)} elements", f"{len(b)} elements"
    elif type(a) is type(b) and (form := _place_form(a)):
        mine, theirs = (
            value if isinstance(value, dict) else dict(enumerate(value)) if is_list else vars(value)
            for value in (a, b)
        )
        for key in [*mine, *(key for key in theirs if key not in mine)]:
            place = where + form.format(key)
            if key not in theirs:
                yield place, _short(mine[key]), "nothing"
            elif key not in mine:
                yield place, "nothing", _short(theirs[key])
            else:
                yield from differing_places(mine[key], theirs[key], place)
    elif type(a) is not type(b) or not _is_same(a, b):
        yield where, _short(a), _short(b)


def _place_form(value: Any) -> str:
    """How a place within the value is written; empty for values that hold no others."""
    if isinstance(value, (dict, list, tuple)):
        return "[{!r}]"
    if isinstance(value, (type, torch.Tensor)) or not getattr(value, "__dict__", None):
        return ""
    return ".{}"


def _is_same(a: Any, b: Any) -> bool:
    """Whether two values of one type, that hold no others, are equal to the bit."""
    if isinstance(a, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return bool(alike and torch.equal(_bits(a), _bits(b)))
    if isinstance(a, np.ndarray):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return bool(alike and a.tobytes() == b.tobytes())
    if isinstance(a, io.BytesIO):
        return bool(a.getvalue() == b.getvalue())
    if isinstance(a, float) and math.isnan(a):
        return bool(math.isnan(b))
    return bool(a == b)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 4]} ..."
