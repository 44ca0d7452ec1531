"""Figures about the elements of arrays: smallest, largest, mean, and shares of NaN and zeros."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dist_ckpt_strategies.comm.shared_work import Count, Ranks, Watch
from dist_ckpt_strategies.core.array import ArraySpec, Region
from dist_ckpt_strategies.storage.store import ArrayRead, HostArray
from dist_ckpt_strategies.tools.opened import OpenedCheckpoint
from dist_ckpt_strategies.tools.options import ConvertOptions
from dist_ckpt_strategies.tools.plan_convert import blocks
from dist_ckpt_strategies.tools.writers import Memory


@dataclass(frozen=True, slots=True)
class ArrayStats:
    """Figures about an array; of complex elements, about their magnitudes.

    Attributes:
        key: of the array.
        min: smallest element that is not NaN; None without any.
        max: largest of them.
        mean: of all that are not NaN, in float64; infinite where one is.
        nan: share of elements that are NaN, from 0 to 1.
        zeros: share of elements that are 0.
    """

    key: str
    min: float | int | None
    max: float | int | None
    mean: float | None
    nan: float
    zeros: float


def stats_of(
    opened: OpenedCheckpoint,
    keys: Collection[str],
    options: ConvertOptions,
    watch: Watch | None = None,
) -> list[ArrayStats]:
    """Figures about arrays, in the order of their keys; reads each element once, in blocks.

    Memory: ``block_nbytes`` for each thread, and four times as much for small dtypes. Raises a
    StorageError where elements are missing or damaged.
    """
    arrays = opened.unchanged(lambda: opened.find(keys))
    memory = Memory()
    tasks = [
        (array, block)
        for array in arrays
        for block in blocks(Region.whole(array.shape), array.dtype.itemsize, options.block_nbytes)
        if block.numel
    ]

    def work(task: tuple[ArraySpec, Region], count: Count) -> list[Any]:
        array, block = task
        elements = memory.array(block.shape, array.dtype)
        opened.unchanged(lambda: opened.read_into(ArrayRead(array, block, elements)))
        count(elements.nbytes)
        return _figures(elements.reshape(-1))

    results = Ranks(None).share(
        tasks,
        lambda task: task[1].numel * task[0].dtype.itemsize,
        work,
        num_threads=options.threads,
        watch=watch,
    )
    figures_of: dict[str, list[list[Any]]] = {array.key: [] for array in arrays}
    for number, (array, _) in enumerate(tasks):
        figures_of[array.key].append(results[number])
    return [_together(key, figures) for key, figures in figures_of.items()]


def _figures(elements: HostArray) -> list[Any]:
    """Count, NaN, zeros, sum, smallest and largest of one block."""
    kind = elements.dtype.kind
    if kind == "c":
        elements = np.abs(elements)
    elif kind == "b":
        elements = elements.view(np.uint8)
    elif kind not in "iuf":
        elements = elements.astype(np.float32)  # of ml_dtypes, whose own functions are slow
    num_nan = int(np.isnan(elements).sum()) if elements.dtype.kind == "f" else 0
    num_zeros = elements.size - int(np.count_nonzero(elements))
    if num_nan:
        elements = elements[~np.isnan(elements)]
    if not elements.size:
        return [num_nan, num_nan, num_zeros, 0.0, None, None]
    with np.errstate(invalid="ignore", over="ignore"):
        total = float(elements.sum(dtype=np.float64))
    return [
        elements.size + num_nan,
        num_nan,
        num_zeros,
        total,
        elements.min().item(),
        elements.max().item(),
    ]


def _together(key: str, figures: Sequence[Sequence[Any]]) -> ArrayStats:
    """Those of an array, out of those of its blocks."""
    if not figures:
        return ArrayStats(key, None, None, None, 0.0, 0.0)
    sizes, nans, zeros, totals, smallest, largest = zip(*figures, strict=True)
    size, num_nan = sum(sizes), sum(nans)
    return ArrayStats(
        key,
        min((n for n in smallest if n is not None), default=None),
        max((n for n in largest if n is not None), default=None),
        sum(totals) / (size - num_nan) if size > num_nan else None,
        num_nan / size,
        sum(zeros) / size,
    )
