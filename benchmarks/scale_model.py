"""Plan a two-stage load for groups far larger than this machine, and say what the planning costs.

    python benchmarks/scale_model.py --out scale_model.jsonl
    python benchmarks/scale_model.py --smoke

Every rank of a group makes the same plan from what all of them want, so one process can do what
each of thousands would do. For every case a new process describes what the ranks want, reads the
descriptions as a rank does that has gathered them, plans, and picks one rank's part. Timed is all
from the gathered bytes on. Nothing is sent and nothing is read.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer
from rich.table import Table

from benchmarks.measuring.command_line import NOWHERE, Out, Smoke, open_output
from dist_ckpt_strategies.core.array import ArraySpec, DType, array_to_wire
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.two_stage.plan import GroupPlan, build_group_plan, encode_regions

_ROWS, _COLUMNS = 64, 256
_MAX_INFLIGHT_BYTES = 512 << 20
_MIB = 1 << 20


class Shape(StrEnum):
    """How much the ranks of a group have in common: all of what they want, or nothing."""

    SHARED = "shared"
    DISTINCT = "distinct"


@dataclass(frozen=True, slots=True)
class ScaleCase:
    """A group of ranks, and what they want.

    Attributes:
        num_ranks: in the group.
        shards_per_rank: that each of them wants, of 64 KiB each.
        shape: whether they are the same for all.
    """

    num_ranks: int
    shards_per_rank: int
    shape: Shape


@dataclass(frozen=True, slots=True)
class Cost:
    """What one rank spends on a plan.

    Attributes:
        seconds: from the gathered bytes to its own part of the plan.
        memory_nbytes: most resident memory beyond what the process had before, the gathered bytes
            included.
        gathered_nbytes: bytes of metadata that the rank gets: keys, arrays, wants; equal ones once.
        unevenness: most bytes that a rank reads, by the mean.
        num_rounds: of the transfer.
    """

    seconds: float
    memory_nbytes: int
    gathered_nbytes: int
    unevenness: float
    num_rounds: int


def cases(*, smoke: bool) -> Iterator[ScaleCase]:
    """The bound of the design, in both shapes; then 100,000 shards in groups of all sizes."""
    sizes = (4, 16) if smoke else (16, 64, 256, 1024, 4096, 16384)
    num_shards = 1000 if smoke else 100_000
    for shape in Shape:
        yield ScaleCase(sizes[len(sizes) // 2], 1000, shape)
    for num_ranks in sizes:
        yield ScaleCase(num_ranks, num_shards, Shape.SHARED)
        yield ScaleCase(num_ranks, -(-num_shards // num_ranks), Shape.DISTINCT)


def measured(case: ScaleCase) -> Cost:
    """What planning costs in this process, which should have done nothing before."""
    before = _peak_nbytes()
    arrays, contents = _described(case)
    started = time.perf_counter()
    requests = {content: content.decode() for content in set(contents)}
    plan = build_group_plan(
        [requests[content] for content in contents],
        arrays,
        [None] * case.num_ranks,
        max_inflight_bytes=_MAX_INFLIGHT_BYTES,
    )
    plan.rounds_of(case.num_ranks // 2)
    seconds = time.perf_counter() - started
    memory = _peak_nbytes() - before
    read = _read_nbytes(case, plan)
    descriptions = sum(len(json.dumps(array_to_wire(array))) + 1 for array in arrays)
    keys = sum(len(json.dumps(array.key)) + 2 for array in arrays)
    gathered = descriptions + keys + sum(map(len, set(contents)))
    return Cost(seconds, memory, gathered, max(read) * len(read) / sum(read), len(plan.rounds))


def _read_nbytes(case: ScaleCase, plan: GroupPlan) -> list[int]:
    """What each rank reads: its part of the plan, or where nothing is shared what it requests."""
    alone = 0 if plan.shared else case.shards_per_rank * _ROWS * _COLUMNS * DType.FLOAT32.itemsize
    read = [alone] * case.num_ranks
    for batches in plan.rounds:
        for batch in batches:
            read[batch.reader] += sum(each.nbytes for each in batch.slices)
    return read


def _described(case: ScaleCase) -> tuple[list[ArraySpec], list[bytes]]:
    """The arrays, and for each rank the bytes that tell the others what it wants."""
    height = _ROWS * (case.num_ranks if case.shape is Shape.DISTINCT else 1)
    arrays = [
        ArraySpec(
            f"decoder.layers.self_attention.{number:06}.weight",
            (height, _COLUMNS),
            DType.FLOAT32,
            (_ROWS, _COLUMNS),
        )
        for number in range(case.shards_per_rank)
    ]
    requests = [
        encode_regions(
            (number, Region((rank * _ROWS, 0), (_ROWS, _COLUMNS)))
            for number in range(case.shards_per_rank)
        ).encode()
        for rank in range(case.num_ranks if case.shape is Shape.DISTINCT else 1)
    ]
    return arrays, requests if case.shape is Shape.DISTINCT else requests * case.num_ranks


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build_table(found: list[tuple[ScaleCase, Cost]]) -> Table:
    """One row for each case."""
    table = Table(title="Planning of a two-stage load, on each rank")
    for column in ("shape", "ranks", "shards each", "seconds", "memory MiB", "metadata MiB"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    table.add_column("max/mean read", justify="right")
    table.add_column("rounds", justify="right")
    for case, cost in found:
        table.add_row(
            case.shape.value,
            f"{case.num_ranks:,}",
            f"{case.shards_per_rank:,}",
            f"{cost.seconds:.2f}",
            f"{cost.memory_nbytes / _MIB:,.0f}",
            f"{cost.gathered_nbytes / _MIB:,.2f}",
            f"{cost.unevenness:.3f}",
            f"{cost.num_rounds}",
        )
    return table


def main(
    *,
    ranks: Annotated[int | None, typer.Option(help="Only groups of this size.")] = None,
    out: Out = NOWHERE,
    smoke: Smoke = False,
) -> None:
    """Plan two-stage loads for groups of up to 16,384 ranks."""
    with open_output(out, "scale_model.py") as output:
        found = []
        for case in cases(smoke=smoke):
            if ranks not in {None, case.num_ranks}:
                continue
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                cost = pool.submit(measured, case).result()
            output.lines.write("cost", cost, case=case)
            found.append((case, cost))
        output.console.print(build_table(found))


if __name__ == "__main__":
    typer.run(main)
