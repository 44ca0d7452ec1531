"""Sections of the page about training: local checkpoints, saves behind it, ranks that fail."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.contenders.roster import LOCAL_FLOOR, MEMCPY, NVRX, QUEUE
from benchmarks.page.figures import BarFigure, BarPanel, Figure, bar_of
from benchmarks.page.ratios import Shown, is_ours, ratio_panel, ratio_section
from benchmarks.page.results import Found, Line, spread_of, summarise_rounds
from benchmarks.page.text import (
    Section,
    case_text,
    mib_text,
    ratio_cell,
    ratio_text,
    seconds_cell,
    stats_table,
    table,
)
from benchmarks.page.words import ASYNC, DAMAGE, LOCAL, RECOVERED, RECOVERY

_NINETY: Final = 0.9


def local_section(found: Found) -> Section:
    """Checkpoints on the nodes' own disks."""
    alt = "local checkpoints, as ratios to the floor"
    return ratio_section("Local checkpoints", LOCAL, "local_replicated", alt, _local(found))


def _local(found: Found) -> Iterator[Shown]:
    for case, step in found.cases_and_steps():
        fields: dict[str, Any] = dict(case)
        stats = summarise_rounds(found.samples(case, step), (LOCAL_FLOOR, NVRX))
        where = f"{fields['num_ranks']} ranks x {mib_text(fields['rank_nbytes'])}"
        title = f"{step}: {where}, {fields['file_system']}"
        floors = {LOCAL_FLOOR: "of the floor", NVRX: "of nvrx"}
        panel = ratio_panel(title, stats, LOCAL_FLOOR, (LOCAL_FLOOR,))
        yield Shown(title, stats_table(stats, floors), panel)


def async_section(found: Found) -> Section:
    """What training waits for, and what slows it down."""
    alt = "what training waits for, and how much longer its steps take"
    return ratio_section("Saves behind training", ASYNC, "async_save", alt, _async(found))


def _async(found: Found) -> Iterator[Shown]:
    for case in found.cases():
        fields: dict[str, Any] = dict(case)
        samples = found.samples(case)
        if fields["part"] == "blocking":
            title = f"blocking: {case_text(case)}"
            stats = summarise_rounds(samples, (MEMCPY,))
            panel = ratio_panel(title, stats, MEMCPY, (MEMCPY,))
            yield Shown(title, _blocking_table(samples), panel)
        else:
            title = f"training: {case_text(case)}"
            shares = " Both cores are threads of one." if fields["shares_core"] else ""
            text = f"Steps of about {1000 * fields['step_seconds']:.0f} ms.{shares}"
            panel = _training_panel(title, samples)
            yield Shown(title, f"{text}\n\n{_training_table(samples)}", panel)


def recovery_section(faults: Found, overhead: Found) -> Section:
    """Seconds from a fault until the last rank is in a step again; what it costs without faults."""
    parts: list[str | Figure] = [RECOVERY]
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for line in faults.of_kind("recovery"):
        groups[str(line["fault"]["kind"]), int(line["num_spares"])].append(float(line["seconds"]))
    if groups:
        parts += [_recovery_figure(groups), _recovery_table(groups)]
    if faults.lines:
        parts.append(_verdict(faults))
    summaries = overhead.of_kind("summary")
    if summaries:
        rows = [
            [
                str(line["contender"]),
                f"{line['ms_per_step']:.2f}",
                f"{100 * line['share']:.2f} %",
                str(line["mirrored_nbytes"]),
                str(line["vote_nbytes"]),
            ]
            for line in summaries
        ]
        titles = ("without faults", "ms per step", "of 0.5 s", "bytes mirrored", "bytes voted")
        parts.append(table(titles, rows))
    return Section("Recovery", tuple(parts))


def faults_section(campaigns: Mapping[str, Found]) -> Section:
    """How many faults were injected, and that nothing wrong was loaded."""
    rows = []
    for name, found in campaigns.items():
        for line in found.of_kind("campaign"):
            cases = ", ".join(f"{count:,} {kind}" for kind, count in sorted(line["cases"].items()))
            rows.append([name, cases, str(line["seed"]), str(line["violations"])])
        rows += [
            [name, "stopped by a violation", str(line["seed"]), "1"]
            for line in found.of_kind("violation")
        ]
    if not rows:
        return Section("Damage", ())
    return Section("Damage", (DAMAGE, table(("what", "cases", "seed", "violations"), rows)))


def _values(samples: Sequence[Line], contender: str, name: str) -> list[float]:
    return [float(x["values"][name]) for x in samples if x["contender"] == contender]


def _contenders(samples: Sequence[Line]) -> list[str]:
    return sorted({str(line["contender"]) for line in samples}, key=lambda n: (is_ours(n), n))


def _blocking_table(samples: Sequence[Line]) -> str:
    rows = []
    for stat in summarise_rounds(samples, (MEMCPY, QUEUE)):
        there = spread_of(_values(samples, stat.contender, "until_there"))
        ratios = [ratio_cell(stat.ratios.get(name)) for name in (MEMCPY, QUEUE)]
        rows.append([stat.contender, seconds_cell(stat.seconds), *ratios, seconds_cell(there)])
    return table(("contender", "blocks, s", "of memcpy", f"of {QUEUE}", "until it is there"), rows)


def _training_table(samples: Sequence[Line]) -> str:
    rows = []
    for name in _contenders(samples):
        slowdown = spread_of(_values(samples, name, "slowdown"))
        worst = spread_of(_values(samples, name, "worst"))
        idle = spread_of(_values(samples, name, "worst_idle"))
        rows.append([name, ratio_cell(slowdown), ratio_text(worst.median), ratio_text(idle.median)])
    titles = ("contender", "median step, of an idle one", "worst step", "worst idle step")
    return table(titles, rows)


def _training_panel(title: str, samples: Sequence[Line]) -> BarPanel:
    bars = [
        bar_of(name, spread_of(_values(samples, name, "slowdown")), is_ours=is_ours(name))
        for name in _contenders(samples)
    ]
    return BarPanel(title, "median step, times an idle one", tuple(bars))


def _recovery_table(groups: Mapping[tuple[str, int], Sequence[float]]) -> str:
    rows = []
    for (kind, num_spares), seconds in sorted(groups.items()):
        spread = spread_of(seconds)
        at_ninety = sorted(seconds)[min(len(seconds) - 1, math.floor(_NINETY * len(seconds)))]
        cells = [f"{value:.3f}" for value in (spread.median, at_ninety, spread.high)]
        rows.append([kind, str(num_spares), str(len(seconds)), *cells])
    return table(("fault", "spares", "faults", "median s", "90 % s", "longest s"), rows)


def _recovery_figure(groups: Mapping[tuple[str, int], Sequence[float]]) -> BarFigure:
    bars = []
    for (kind, num_spares), seconds in sorted(groups.items()):
        spread = spread_of(seconds)
        label = f"{kind}, {'a spare' if num_spares else 'no spare'}"
        bars.append(bar_of(label, spread, is_ours=True))
    panel = BarPanel("until all ranks are in a step again", "seconds", tuple(bars), mark=None)
    return BarFigure("recovery", "seconds until all ranks are in a step again", (panel,))


def _verdict(faults: Found) -> str:
    if violations := faults.of_kind("violation"):
        return f"**A violation**, seed {violations[0]['seed']}: {violations[0]['why']}"
    campaigns = faults.of_kind("campaign")
    if not campaigns:
        number = len(faults.of_kind("recovery"))
        return f"{number:,} faults; the campaign has not come to its end, so there is no verdict."
    number = sum(int(line["faults"]) for line in campaigns)
    return f"{number:,} faults, no violation: {RECOVERED}"
