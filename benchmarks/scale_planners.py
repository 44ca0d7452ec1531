"""Make the plans of a trillion-parameter job, and of smaller parts of it, as each rank makes them.

    python benchmarks/scale_planners.py --out scale_planners.jsonl
    python benchmarks/scale_planners.py --ranks 1024 --plan "save, format 2"
    python benchmarks/scale_planners.py --smoke

Every rank plans alone, from what all have told it, and all come to the same plan; so one process
can do what each of thousands would do. For each case a new process has the descriptions that all
ranks would send, as a rank that has gathered them, reads them and plans; processor time and memory
are its own. Nothing is sent, read or written. After that comes what follows for
16,384 ranks on paper.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer
from rich.table import Table

from benchmarks.measuring.command_line import NOWHERE, Out, Smoke, open_output
from benchmarks.scale.job import TRILLION, Job, smaller
from benchmarks.scale.paper import ASSUMED, BANDWIDTHS, node_times_of, sheet_of, times_of
from benchmarks.scale.rehearsals import COPIES, REHEARSALS, Planner, Tally

_MIB = 1 << 20
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SIZES = (64, 256, 1024, 16_384)
_SMOKE_SIZES = (4,)


@dataclass(frozen=True, slots=True)
class PlannerCase:
    """What is planned, and for how many ranks."""

    planner: Planner
    num_ranks: int


@dataclass(frozen=True, slots=True)
class PlannerCost:
    """What one rank spends on a plan.

    Attributes:
        cpu_seconds: from the gathered bytes to its own part of the plan.
        memory_nbytes: the most that it took at a time, the gathered bytes included.
        gathered_nbytes: that all ranks together have told it.
        num_items: described in them: shards, parts, files.
        num_steps: that the plan has: rounds or messages, each of them a meeting of those concerned.
    """

    cpu_seconds: float
    memory_nbytes: int
    gathered_nbytes: int
    num_items: int
    num_steps: int


def planner_cases(sizes: Sequence[int]) -> Iterator[PlannerCase]:
    """Every planner for every number of ranks."""
    for planner in Planner:
        for num_ranks in sizes:
            yield PlannerCase(planner, num_ranks)


def job_of(case: PlannerCase) -> Job:
    """The job that a case plans for."""
    return smaller(case.num_ranks)


def described(case: PlannerCase) -> list[bytes]:
    """What each rank tells the others."""
    return REHEARSALS[case.planner].describe(job_of(case))


def measured(case: PlannerCase, told: list[bytes]) -> PlannerCost:
    """What planning costs in this process, which should have done nothing before."""
    job, plan = job_of(case), REHEARSALS[case.planner].plan
    gathered = sum(map(len, set(told)))  # what several ranks say alike is sent once
    gc.freeze()  # what this process has imported is not looked through again and again
    _CLEAR.write_text("5", encoding="ascii")  # the peak begins anew
    before = _status_nbytes("VmRSS")
    started = time.process_time()
    tally: Tally = plan(job, told)
    cpu_seconds = time.process_time() - started
    memory = _status_nbytes("VmHWM") - before + gathered
    return PlannerCost(cpu_seconds, memory, gathered, tally.num_items, tally.num_steps)


def _status_nbytes(name: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_STATUS}: no {name}")


def _in_a_new_process(case: PlannerCase) -> PlannerCost:
    told = described(case)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measured, case, told).result()


def build_table(found: Sequence[tuple[PlannerCase, PlannerCost]]) -> Table:
    """One row for each case."""
    table = Table(title="Planning, on each rank")
    for column in ("plan", "ranks", "CPU s", "us per item", "memory MiB", "gathered MiB", "steps"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for case, cost in found:
        table.add_row(
            case.planner.value,
            f"{case.num_ranks:,}",
            f"{cost.cpu_seconds:.2f}",
            f"{cost.cpu_seconds * 1e6 / cost.num_items:.1f}",
            f"{cost.memory_nbytes / _MIB:,.0f}",
            f"{cost.gathered_nbytes / _MIB:,.1f}",
            f"{cost.num_steps:,}",
        )
    return table


def main(
    *,
    ranks: Annotated[list[int] | None, typer.Option(help="Numbers of ranks.")] = None,
    plan: Annotated[list[Planner] | None, typer.Option(help="Only these plans.")] = None,
    out: Out = NOWHERE,
    smoke: Smoke = False,
) -> None:
    """Plan for up to 16,384 ranks in one process each, and work out the rest on paper."""
    sizes = ranks or (_SMOKE_SIZES if smoke else _SIZES)
    with open_output(out, "scale_planners.py") as output:
        found = []
        for case in planner_cases(sizes):
            if plan and case.planner not in plan:
                continue
            cost = _in_a_new_process(case)
            output.lines.write("planner", cost, case=case)
            found.append((case, cost))
        output.console.print(build_table(found))
        job = smaller(max(sizes)) if smoke else TRILLION
        sheet = sheet_of(job)
        output.lines.write("sheet", sheet, job=job, hardware=ASSUMED)
        times = [times_of(job, sheet, bandwidth) for bandwidth in BANDWIDTHS]
        for one in times:
            output.lines.write("times", one)
        output.lines.write("node times", node_times_of(sheet, COPIES), copies=COPIES)
        output.console.print(sheet, *times, node_times_of(sheet, COPIES), sep="\n")


if __name__ == "__main__":
    typer.run(main)
