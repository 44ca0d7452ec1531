"""Record one save and one two-stage load: who read, copied, broadcast and waited when?

    python benchmarks/timeline.py --out timeline.jsonl
    python benchmarks/timeline.py --smoke

Each call is made some times, after one that does not count, and recorded at the seams of the
package (measuring/spans.py); the one whose seconds are the median is written, for each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer
from rich.table import Table

from benchmarks.contenders.roster import TWO_STAGE_ZARR
from benchmarks.measuring.command_line import Contest, Output, Where, among, contest_command
from benchmarks.measuring.disks import drop_cache, file_system, retire, touch_memory, workspace
from benchmarks.measuring.gpt_state import GptSize
from benchmarks.measuring.harness import Ranks, made_in
from benchmarks.measuring.spans import Call, Recording, Span, joined, totals_of, with_rest
from benchmarks.measuring.timings import Case

_WORKER = "benchmarks.ranks.timeline"
_CLOSE = 1000
"""Spans closer than one part in so many of the call are written as one."""


CALLS: Mapping[str, Call] = MappingProxyType(
    {
        call.name: call
        for call in (
            Call("save, zarr 1", "zarr 1", is_load=False),
            Call("save, zarr 2", "zarr 2", is_load=False),
            Call("two-stage load, zarr 1", TWO_STAGE_ZARR, is_load=True),
        )
    }
)


def run_call(
    size: GptSize, call: Call, num_ranks: int, place: Path, contest: Contest, output: Output
) -> None:
    """Record one call in one place, and report it."""
    make = made_in(_WORKER, size, call)
    with Ranks(num_ranks, make, timeout_s=contest.timeout_s, preload=(_WORKER,)) as ranks:
        nbytes = sum(ranks.step("nbytes").values) // (num_ranks if call.is_load else 1)
        num_replicas = num_ranks if call.is_load else 1
        case = Case(file_system(place), nbytes, size.num_arrays, num_ranks, num_replicas)
        with workspace(place) as directory:
            recordings = list(_recordings(ranks, call, case, directory, contest.repetitions))
    chosen = sorted(recordings, key=_seconds)[(len(recordings) - 1) // 2]
    for fields in _lines(call, chosen):
        output.lines.write("timeline", fields, case=case)
    output.console.print(_table(call, case, chosen))


def _recordings(
    ranks: Ranks, call: Call, case: Case, directory: Path, repetitions: int
) -> Iterator[tuple[Recording, ...]]:
    """Of all ranks, for each repetition; the first of all does not count."""
    target = directory / "checkpoint"
    for repetition in range(repetitions + 1):
        if target.exists() and not call.is_load:
            retire(target, directory / "attic")
        is_new = not target.exists()
        if is_new:
            target.mkdir()
        if call.is_load and is_new:
            ranks.step("save", target)
            ranks.step("flush", target)
        touch_memory(case.held_nbytes)
        if call.is_load:
            ranks.step("clear")
            drop_cache(target)
        recorded = ranks.step("record", target).values
        ranks.step("check")
        if repetition > 0:
            yield recorded


def _seconds(recordings: Sequence[Recording]) -> float:
    return max(one.end for one in recordings) - min(one.begin for one in recordings)


def _lines(call: Call, recordings: Sequence[Recording]) -> Iterator[dict[str, Any]]:
    """One for each rank; times count from the first rank's start."""
    first = min(one.begin for one in recordings)
    seconds = _seconds(recordings)
    for rank, one in enumerate(recordings):
        spans = with_rest(one.spans, one.begin, one.end)
        shown = [
            asdict(Span(span.lane, span.kind, span.begin - first, span.end - first))
            for span in joined(spans, seconds / _CLOSE)
        ]
        fields = {"seconds": seconds, "spans": shown, "totals": totals_of(spans)}
        yield {"call": call.name, "rank": rank, **fields}


def _table(call: Call, case: Case, recordings: Sequence[Recording]) -> Table:
    found = [totals_of(with_rest(one.spans, one.begin, one.end)) for one in recordings]
    table = Table(title=f"{call.name}: {case}; {_seconds(recordings):.3f} s")
    table.add_column("seconds")
    for rank in range(len(found)):
        table.add_column(f"rank {rank}", justify="right")
    for kind in dict.fromkeys(kind for totals in found for kind in totals):
        table.add_row(kind, *(f"{totals.get(kind, 0.0):.3f}" for totals in found))
    return table


@contest_command({}, (), sizes_gb=(0.5,), where=Where.DISK, repetitions=5)
def main(
    contest: Contest,
    output: Output,
    *,
    ranks: Annotated[int, typer.Option(min=2, help="Processes.")] = 2,
    call: Annotated[
        list[str] | None, typer.Option(help="Only these; see CALLS.", callback=among(CALLS))
    ] = None,
) -> None:
    """Record one save and one two-stage load."""
    for size in contest.sizes:
        for place in contest.places:
            for name in call or CALLS:
                run_call(size, CALLS[name], ranks, place, contest, output)


if __name__ == "__main__":
    typer.run(main)
