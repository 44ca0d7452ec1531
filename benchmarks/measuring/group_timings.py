"""What samples of loads by a group of replicas amount to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from rich.table import Table

from benchmarks.contenders.roster import GROUP_ENTRIES, READ_SHARES, SEND_SHARES, Role
from benchmarks.measuring.harness import paired_ratio
from benchmarks.measuring.timings import Case, Sample, Step

FLOOR: Final = "floor"

_FLOOR_TARGET = 1.5
_PEER_TARGET = 0.35


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """What the samples of one contender amount to.

    Attributes:
        step: what was timed.
        contender: whose; ``FLOOR`` for, in each round, the longer of its two parts.
        num_samples: how many.
        seconds: median.
        floor_ratio: median, over the rounds, of the ratio to the floor.
        peer_ratios: as ``floor_ratio``, to each way of Megatron-Core that took part.
    """

    step: Step
    contender: str
    num_samples: int
    seconds: float
    floor_ratio: float
    peer_ratios: Mapping[str, float]


def summarise_group(samples: Sequence[Sample]) -> list[GroupSummary]:
    """One summary for each contender and one for the floor, in the order of the table."""
    found: dict[str, list[float]] = defaultdict(list)
    for sample in sorted(samples, key=lambda s: s.repetition):
        found[sample.contender].append(sample.seconds)
    floor = [max(parts) for parts in zip(found[READ_SHARES], found[SEND_SHARES], strict=True)]
    by_name = {name: found[name] for name in GROUP_ENTRIES if name in found} | {FLOOR: floor}
    names = sorted(by_name, key=lambda name: name not in {READ_SHARES, SEND_SHARES, FLOOR})
    peers = [name for name in names if _role(name) is Role.PEER]
    return [
        GroupSummary(
            samples[0].step,
            name,
            len(by_name[name]),
            median(by_name[name]),
            paired_ratio(by_name[name], floor),
            {peer: paired_ratio(by_name[name], by_name[peer]) for peer in peers},
        )
        for name in names
    ]


def build_group_table(case: Case, summaries: Sequence[GroupSummary]) -> Table:
    """The case as a table: seconds, and the ratios to floor and peers beside their targets."""
    table = Table(title=f"{case}, {summaries[0].step}: median seconds, median ratios (targets)")
    table.add_column("contender", no_wrap=True)
    table.add_column("seconds", justify="right")
    table.add_column("of the floor", justify="right")
    for peer in summaries[0].peer_ratios:
        table.add_column(f"of {peer}", justify="right")
    for summary in summaries:
        ours = _role(summary.contender) is Role.OURS
        table.add_row(
            summary.contender,
            f"{summary.seconds:.3f}",
            _cell(summary.floor_ratio, _FLOOR_TARGET if ours else None),
            *(_cell(x, _PEER_TARGET if ours else None) for x in summary.peer_ratios.values()),
        )
    return table


def _role(contender: str) -> Role:
    return Role.FLOOR if contender == FLOOR else GROUP_ENTRIES[contender].role


def _cell(ratio: float, target: float | None) -> str:
    return f"{ratio:.2f}" if target is None else f"{ratio:.2f} (<= {target:g})"
