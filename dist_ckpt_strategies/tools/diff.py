"""How two checkpoints of any formats differ: keys, shapes, dtypes, every element, every object."""

import io
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.shared_work import Count, Ranks, Watch
from dist_ckpt_strategies.core.array import Region, Shape
from dist_ckpt_strategies.errors import ArrayNotFoundError
from dist_ckpt_strategies.formats.objects import Allowed, load_content
from dist_ckpt_strategies.megatron.types import default_allowed, raises_megatron_errors
from dist_ckpt_strategies.storage.files import COMMON_NAME
from dist_ckpt_strategies.storage.store import HostArray
from dist_ckpt_strategies.tools.convert import ConvertOptions
from dist_ckpt_strategies.tools.plan_convert import SourceArray, blocks, chunk_grid, stored_regions
from dist_ckpt_strategies.tools.readers import Memory
from dist_ckpt_strategies.tools.writers import bytes_of

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
        a: directory of a finished checkpoint: ("safetensors", 1), ("zarr", 1), ("zarr", 2) or
            torch_dist. Of ("safetensors", 1) and ("zarr", 2) also its URL.
        b: another one.
        keys: compare only arrays whose keys match this glob, and no objects.
        allow: further classes that objects and the common state may be unpickled to.
        options: memory and threads of each process.
        watch: called from time to time with the bytes of one side, done and in total.
        comm: ranks that share the work; see ``convert``.

    Raises:
        ArrayNotFoundError: no key in either of them matches.
        StorageError: one of them is missing or damaged.
        UnsafeObjectError: an object that differs needs a class that is not allowed.
    """
    allowed = [*default_allowed(), *allow]
    comparison = _Comparison(options or ConvertOptions(), allowed, Ranks(comm))
    return comparison.run(a, b, keys, watch)


class _Comparison:
    """One comparison, on all ranks of a communicator."""

    def __init__(self, options: ConvertOptions, allow: Allowed, ranks: Ranks) -> None:
        self._options, self._allow, self._ranks = options, allow, ranks
        self._memory = Memory()

    def run(
        self, a: str | Path, b: str | Path, keys: str | None, watch: Watch | None
    ) -> DiffReport:
        """Compare the keys, then the elements, then the objects. Collective."""
        mine, theirs = self._ranks.run(lambda: self._open(a, b, keys))
        found, same = [], []
        for key in sorted(mine.keys() | theirs.keys()):
            misfit = _misfit(key, mine.get(key), theirs.get(key))
            if misfit is None:
                same.append(mine[key])
            else:
                found.append(misfit)
        found += self._compared(same, watch)
        found.sort(key=lambda difference: difference.key)
        num_arrays, nbytes = len(mine.keys() & theirs.keys()), sum(array.nbytes for array in same)
        if keys is not None:
            return DiffReport(tuple(found), (), num_arrays, 0, nbytes)

        def objects() -> tuple[int, list[Any]]:
            differing = self._read(lambda: list(map(astuple, self._objects())))
            return len({*self._a.objects} & {*self._b.objects}), differing

        num_objects, fields = self._ranks.run_on_first(objects)
        differing = (ObjectDifference(key, Difference(what), *rest) for key, what, *rest in fields)
        return DiffReport(tuple(found), tuple(differing), num_arrays, num_objects, nbytes)

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
        self._read(lambda: None)
        return found

    def _read(self, step: Callable[[], Any]) -> Any:
        """What a step reads of both, each of which is still the save that was opened."""
        return self._a.save.read(lambda: self._b.save.read(step))

    def _compared(
        self, arrays: Sequence[SourceArray], watch: Watch | None
    ) -> Iterable[ArrayDifference]:
        """How arrays that both have in one shape and dtype differ. Collective.

        The stored regions of the first checkpoint are what ranks and threads take in turn.
        """
        results = self._ranks.share(
            [(array, part) for array in arrays if array.nbytes for part in stored_regions(array)],
            lambda task: task[1].numel * task[0].dtype.itemsize,
            lambda task, count: self._read(lambda: self._values(*task, count)),
            num_threads=self._options.threads,
            watch=watch,
        )
        own = _merged(filter(None, results.values()))
        rows = chain.from_iterable(self._ranks.gather(lambda: list(map(astuple, own))))
        return _merged(
            ArrayDifference(key, Difference(difference), a, b, tuple(index), *rest)
            for key, difference, a, b, index, *rest in rows
        )

    def _values(self, array: SourceArray, region: Region, count: Count) -> ArrayDifference | None:
        """How a region differs; None where it does not."""
        found = []
        itemsize, limit = array.dtype.itemsize, self._options.block_nbytes
        for block in blocks(region, itemsize, limit, array.granularity):
            one = self._memory.array(block.shape, array.dtype, "a")
            other = self._memory.array(block.shape, array.dtype, "b")
            self._a.read([(array.key, block, one)])
            self._b.read([(array.key, block, other)])
            count(block.numel * itemsize)
            mine, theirs = bytes_of(one), bytes_of(other)
            if mine.size % 8 == 0:
                mine, theirs = mine.view(np.uint64), theirs.view(np.uint64)
            if not np.array_equal(mine, theirs):
                found.append(_difference(array.key, block, one, other))
        return next(iter(_merged(found)), None)

    def _objects(self) -> Iterator[ObjectDifference]:
        a, b = self._a, self._b
        mine, theirs = set(a.objects), set(b.objects)
        for object_id in sorted(mine | theirs):
            key = object_id.unique_key
            if object_id not in theirs:
                yield ObjectDifference(key, Difference.ONLY_IN_A, "", "an object", "nothing")
            elif object_id not in mine:
                yield ObjectDifference(key, Difference.ONLY_IN_B, "", "nothing", "an object")
            else:
                yield from self._contents(
                    key, a.object_content(object_id), b.object_content(object_id)
                )
        yield from self._contents(COMMON_NAME, a.common_content(), b.common_content())

    def _contents(self, key: str, mine: bytes, theirs: bytes) -> Iterator[ObjectDifference]:
        if mine != theirs:
            a = load_content(mine, f"{self._a.root}/{key}", key, self._allow)
            b = load_content(theirs, f"{self._b.root}/{key}", key, self._allow)
            for found in islice(_differing_places(a, b), _MAX_PLACES):
                yield ObjectDifference(key, Difference.VALUES, *found)


def _merged(found: Iterable[ArrayDifference]) -> Collection[ArrayDifference]:
    """One for each array, out of the differences of its regions."""
    by_key: dict[str, ArrayDifference] = {}
    for other in found:
        one = by_key.setdefault(other.key, other)
        if one is not other:
            largest = (one.max_abs_difference, other.max_abs_difference)
            by_key[one.key] = replace(
                min(one, other, key=lambda found: found.index or ()),
                num_differing=one.num_differing + other.num_differing,
                max_abs_difference=max((n for n in largest if n is not None), default=None),
            )
    return by_key.values()


def _misfit(key: str, one: SourceArray | None, other: SourceArray | None) -> ArrayDifference | None:
    """What keeps the elements of two arrays from being compared, if anything."""
    if one is None or other is None:
        a, b = (
            f"{array.dtype.value} {array.shape}" if array else "nothing" for array in (one, other)
        )
        difference = Difference.ONLY_IN_B if one is None else Difference.ONLY_IN_A
        return ArrayDifference(key, difference, a, b)
    if one.shape != other.shape:
        return ArrayDifference(key, Difference.SHAPE, str(one.shape), str(other.shape))
    if one.dtype is not other.dtype:
        return ArrayDifference(key, Difference.DTYPE, one.dtype.value, other.dtype.value)
    return None


def _difference(key: str, block: Region, one: HostArray, other: HostArray) -> ArrayDifference:
    """How the elements of a block differ, of which at least one does."""
    is_other = (bytes_of(one) != bytes_of(other)).reshape(one.size, -1).any(axis=1)
    places = np.flatnonzero(is_other)
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


def _differing_places(a: Any, b: Any, where: str = "") -> Iterator[tuple[str, str, str]]:
    """Each place at which two values are not the same, and what is there in short."""
    mine = _held(a) if type(a) is type(b) else None
    if mine is None:
        if type(a) is not type(b) or not _is_same(a, b):
            yield where, _short(a), _short(b)
    elif isinstance(a, (list, tuple)) and len(a) != len(b):
        yield where, f"{len(a)} elements", f"{len(b)} elements"
    else:
        theirs = _held(b) or {}
        for place in {**mine, **theirs}:
            if place in mine and place in theirs:
                yield from _differing_places(mine[place], theirs[place], where + place)
            else:
                one = _short(mine[place]) if place in mine else "nothing"
                other = _short(theirs[place]) if place in theirs else "nothing"
                yield where + place, one, other


def _held(value: Any) -> dict[str, Any] | None:
    """What a value holds, by the text of its place there; None of values that hold no others."""
    if isinstance(value, dict):
        return {f"[{key!r}]": held for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"[{number}]": held for number, held in enumerate(value)}
    if isinstance(value, (type, torch.Tensor)) or not getattr(value, "__dict__", None):
        return None
    return {f".{name}": held for name, held in vars(value).items()}


def _is_same(a: Any, b: Any) -> bool:
    """Whether two values of one type, that hold no others, are equal to the bit."""
    if isinstance(a, (torch.Tensor, np.ndarray)) and (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if isinstance(a, torch.Tensor):
        a, b = (t.detach().resolve_conj().resolve_neg() for t in (a, b))
        a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        return bool(torch.equal(a, b))
    if isinstance(a, np.ndarray):
        return bool(a.tobytes() == b.tobytes())
    if isinstance(a, io.BytesIO):
        return bool(a.getvalue() == b.getvalue())
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 4]} ..."
