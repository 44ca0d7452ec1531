"""The readable and the damaged parts of a checkpoint."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from dist_ckpt_strategies.comm.shared_work import Count, Ranks, Watch
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, Region
from dist_ckpt_strategies.errors import (
    CheckpointChangedError,
    CheckpointError,
    CoverageError,
    StorageError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.formats.issues import NO_ANSWER, Problem
from dist_ckpt_strategies.formats.locations import place_of
from dist_ckpt_strategies.formats.objects import dump_object, require_archive
from dist_ckpt_strategies.formats.scan import scan
from dist_ckpt_strategies.formats.zarr2 import METADATA_NAME
from dist_ckpt_strategies.storage.files import COMMON_NAME
from dist_ckpt_strategies.storage.store import ArrayRead
from dist_ckpt_strategies.tools.opened import OpenedCheckpoint
from dist_ckpt_strategies.tools.plan_convert import Format, blocks, require_whole
from dist_ckpt_strategies.tools.writers import Memory
from dist_ckpt_strategies.tools.zarr3 import undescribed_keys

T = TypeVar("T")

_NO_DAMAGE = (*NO_ANSWER, CheckpointChangedError, UnsafeObjectError)


def tried(step: Callable[[], T]) -> tuple[T | None, str]:
    """The result of a step; or None and the reason, if it meets missing or damaged files."""
    try:
        return step(), ""
    except _NO_DAMAGE:
        raise
    except (StorageError, CoverageError) as error:
        return None, error.message


def find_readable(
    opened: OpenedCheckpoint, keys: Iterable[str]
) -> tuple[list[ArraySpec], dict[str, str]]:
    """The arrays of these keys, and why others are damaged: their descriptions, or lost blocks."""
    wanted = list(keys)

    def find(some_keys: Sequence[str]) -> list[ArraySpec]:
        arrays = opened.find(some_keys)
        require_whole(arrays)
        return arrays

    try:
        return find(wanted), {}
    except CheckpointError:  # one by one tells which
        reasons = {key: tried(partial(find, [key]))[1] for key in wanted}
        damaged = {key: why for key, why in reasons.items() if why}
        return find([key for key in wanted if key not in damaged]), damaged


def undescribed(opened: OpenedCheckpoint, keys: str) -> dict[str, str]:
    """The arrays of Zarr that only their chunks tell of, and why; of keys that match."""
    if opened.kind is Format.ZARR3 and isinstance(opened.root, Path):
        lost = {key for key in undescribed_keys(opened.root) if fnmatchcase(key, keys)}
        return {key: f"{opened.root / key}/zarr.json does not exist" for key in sorted(lost)}
    is_zarr, end = opened.kind is Format.ZARR1, f"/{METADATA_NAME}"
    return {
        issue.path.removesuffix(end): f"{opened.root}/{issue}"
        for issue in (scan(opened.root).issues if is_zarr else ())
        if issue.problem is Problem.MISSING_FILE and fnmatchcase(issue.path, keys + end)
    }


def read_all(
    ranks: Ranks,
    opened: OpenedCheckpoint,
    arrays: Sequence[ArraySpec],
    objects: Sequence[ObjectId],
    bounds: tuple[int, int],
    watch: Watch | None,
) -> list[tuple[str, str]]:
    """Keys of damaged arrays and objects, each with the reason. Collective.

    ``bounds``: the number of threads, and the bytes that each of them reads at once.
    """
    memory, (num_threads, max_nbytes) = Memory(), bounds

    def look(task: tuple[ArraySpec, Region], count: Count) -> list[str]:
        array, region = task
        damage = []
        for block in blocks(region, array.dtype.itemsize, max_nbytes):
            read = ArrayRead(array, block, memory.array(block.shape, array.dtype))
            damage.append(tried(partial(opened.read_into, read))[1])
            count(read.target.nbytes)
        return [why for why in damage if why]

    tasks = [(array, region) for array in arrays for region in array.regions()]
    results = ranks.share(
        tasks,
        lambda task: task[1].numel * task[0].dtype.itemsize,
        look,
        num_threads=num_threads,
        watch=watch,
    )

    def damaged() -> list[tuple[str, str]]:
        rows = [(tasks[number][0].key, why) for number in results for why in results[number]]
        for one in objects if ranks.rank == 0 else ():
            _, why = tried(partial(opened.object_content, one))
            rows += [(one.unique_key, why)] if why else []
        return rows

    gathered = ranks.gather(lambda: opened.unchanged(damaged))
    return [(key, why) for key, why in chain.from_iterable(gathered)]


def rescued_common(opened: OpenedCheckpoint) -> tuple[bytes, list[tuple[str, str]]]:
    """The file of the common state, of packs also their copy of it; an empty one, and why."""
    content, why = tried(opened.common_content)
    if content is not None:
        return content, []

    def read_copy() -> bytes:
        copy = place_of(opened.root).read(COMMON_NAME)
        require_archive(copy, f"{opened.root}/{COMMON_NAME}", "common state")
        return copy

    content, _ = tried(read_copy)
    if content is not None:
        return content, []
    return dump_object({}, name="common state"), [(COMMON_NAME, why)]
