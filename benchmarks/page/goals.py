"""What this package aims at, and whether the committed results are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from benchmarks.page.results import (
    IN_MEMORY,
    Case,
    Found,
    Line,
    Stat,
    spread_of,
    summarise_rounds,
)
from benchmarks.page.storage import save_load_stats, two_stage_stats
from benchmarks.page.text import Section, case_text, mib_text, ratio_text, table
from benchmarks.page.words import GOALS

_GIB: Final = 1 << 30
_BARELY: Final = "By little, or for reasons that are not known yet."


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure that a goal is about.

    Attributes:
        where: the case that it was measured in.
        value: in the goal's unit.
    """

    where: str
    value: float


Find = Callable[[Found], Iterator[Measured]]


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on something that is measured.

    Attributes:
        stem: of the benchmark.
        title: what is bound, and in which unit.
        limit: the largest value that is good enough.
        find: the figures, in the results of that benchmark.
        why_missed: what the time goes to where it is missed, as far as that is known.
        show: a value, as the table has it.
    """

    stem: str
    title: str
    limit: float
    find: Find
    why_missed: str = _BARELY
    show: Callable[[float], str] = ratio_text


def goals_section(found: Mapping[str, Found], goals: Sequence[Goal]) -> Section:
    """A row for each goal that has been measured, and what is known about those that are missed."""
    rows: list[list[str]] = []
    misses: dict[str, list[str]] = {}
    for goal in goals:
        measured = list(goal.find(found[goal.stem]))
        if not measured:
            continue
        missed = [one for one in measured if one.value > goal.limit]
        rows.append(_row(goal, measured, len(missed)))
        if missed:
            misses.setdefault(goal.why_missed, []).extend(
                f"{goal.title}: {goal.show(one.value)} ({one.where})" for one in missed
            )
    if not rows:
        return Section("Goals", ())
    parts = [GOALS, table(("goal", "at most", "measured", "met in"), rows)]
    for why, where in misses.items():
        parts += [f"**Missed.** {why}", "\n".join(f"- {text}" for text in where)]
    return Section("Goals", tuple(parts))


def _row(goal: Goal, measured: Sequence[Measured], num_missed: int) -> list[str]:
    spread = spread_of([one.value for one in measured])
    low, high = goal.show(spread.low), goal.show(spread.high)
    shown = low if low == high else f"{low} to {high}"
    met = f"{len(measured) - num_missed} of {len(measured)}"
    return [goal.title, goal.show(goal.limit), shown, f"**{met}**" if num_missed else met]


def _save_load(
    step: str, contender: str, floor: str, found: Found, *, is_in_memory: bool | None = None
) -> Iterator[Measured]:
    for case in found.cases():
        if is_in_memory in {None, dict(case)["file_system"] in IN_MEMORY}:
            yield from _ratio(save_load_stats(found, case, step), contender, floor, case_text(case))


def _two_stage(floor: str, found: Found) -> Iterator[Measured]:
    for case in found.cases():
        where = f"{case_text(case)}, {found.samples(case)[-1]['step']}"
        yield from _ratio(two_stage_stats(found, case), "two-stage, zarr 1", floor, where)


def _reshard(found: Found) -> Iterator[Measured]:
    for case, step in found.cases_and_steps():
        stats = summarise_rounds(found.samples(case, step), ("torch_dist",))
        yield from _ratio(stats, "zarr 2", "torch_dist", _reshard_case(case, step))


def _reshard_bytes(found: Found) -> Iterator[Measured]:
    for case, step in found.cases_and_steps():
        samples = _of_contender(found.samples(case, step), "zarr 2")
        yield _median_value(samples, "read_by_calls", _reshard_case(case, step))


def _blocking(found: Found) -> Iterator[Measured]:
    for case in found.cases():
        if dict(case)["part"] == "blocking":
            stats = summarise_rounds(found.samples(case), ("memcpy",))
            yield from _ratio(stats, "zarr 2", "memcpy", case_text(case))


def _slowest_step(found: Found) -> Iterator[Measured]:
    for case in found.cases():
        fields = dict(case)
        if fields["part"] != "blocking" and not fields["shares_core"]:
            samples = _of_contender(found.samples(case), "zarr 2")
            yield _median_value(samples, "worst", case_text(case))


def _tool(contender: str, found: Found) -> Iterator[Measured]:
    for case, step in found.cases_and_steps():
        stats = summarise_rounds(found.samples(case, step), ("raw read",))
        where = f"from {dict(case)['source']}, {case_text(case)}, {step}"
        yield from _ratio(stats, contender, "raw read", where)


def _tool_memory(found: Found) -> Iterator[Measured]:
    for case in found.cases():
        samples = [s for s in found.samples(case) if not s["contender"].startswith("raw")]
        peaks = [float(sample["values"]["peak_nbytes"]) for sample in samples]
        where = f"from {dict(case)['source']}, {case_text(case)}"
        yield Measured(where, max(peaks))


def _local(step: str, floor: str, found: Found) -> Iterator[Measured]:
    for case in found.cases():
        stats = summarise_rounds(found.samples(case, step), (floor,))
        yield from _ratio(stats, "local manager", floor, _local_case(case))


def _recovered(kind: str, num_spares: int | None, found: Found) -> Iterator[Measured]:
    """Recoveries from faults of one kind; with so many spares, or with any number of them."""
    seconds = [
        float(line["seconds"])
        for line in found.of_kind("recovery")
        if line["fault"]["kind"] == kind and num_spares in {None, line["num_spares"]}
    ]
    if seconds:
        yield Measured(f"{len(seconds)} random faults, 4 ranks", spread_of(seconds).median)


def _overhead(found: Found) -> Iterator[Measured]:
    for line in found.of_kind("summary"):
        yield Measured(str(line["contender"]), float(line["share"]))


def _planning(name: str, found: Found) -> Iterator[Measured]:
    for line in found.of_kind("cost"):
        case = line["case"]
        if (case["num_ranks"], case["shards_per_rank"]) == (1024, 1000):
            yield Measured(f"1,024 ranks x 1,000 shards, {case['shape']}", float(line[name]))


def _ratio(stats: Iterable[Stat], contender: str, floor: str, where: str) -> Iterator[Measured]:
    for stat in stats:
        if stat.contender == contender and floor in stat.ratios:
            yield Measured(where, stat.ratios[floor].median)


def _local_case(case: Case) -> str:
    fields: dict[str, Any] = dict(case)
    size = mib_text(fields["rank_nbytes"])
    return f"{fields['num_ranks']} ranks x {size}, {fields['file_system']}"


def _reshard_case(case: Case, step: str) -> str:
    return f"{dict(case)['move']}, {case_text(case)}, {step}"


def _of_contender(samples: Iterable[Line], contender: str) -> list[Line]:
    return [sample for sample in samples if sample["contender"] == contender]


def _median_value(samples: Iterable[Line], name: str, where: str) -> Measured:
    return Measured(where, spread_of([float(s["values"][name]) for s in samples]).median)


def _s(value: float) -> str:
    return f"{value:.2f} s"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


_PER_ARRAY: Final = (
    "Megatron-Core's own checks, and the description of each array in Python, take a time that "
    "does not depend on the bytes: the same rows come closer with more bytes, and the growth with "
    "the number of arrays is shown below. A plain read of cached files is over before them."
)
_IN_MEGATRON: Final = (
    "Megatron-Core's own part: the plain stream as a strategy of Megatron-Core misses it too, see "
    "its row."
)
_DEVICE: Final = (
    "The disk: one plain read of the same bytes takes nearly as long, or longer than half of what "
    "torch_dist takes."
)
_VERIFIED: Final = (
    "The same share for each array; and inner chunks are made for loads in any layout, so that "
    "their rows are shorter than the tensor's. Each byte is copied out of the page cache, its "
    "digest taken while it is in the processor's cache, and copied to its place: two copies where "
    "the floor has one."
)
_CORES: Final = (
    "Reading, sending and receiving are copies by the processor. The floor takes only the longer "
    "of them; where the ranks have no core for each, they add up."
)
_ONE_CACHE: Final = (
    "The ranks share one machine and its page cache: what torch_dist reads several times costs it "
    "one copy each. Cold, the plain read of just the bytes that are needed takes more than a third "
    "of torch_dist's time too."
)
_NVRX: Final = (
    "The plainest exchange and write, or read, of the same bytes takes about half of NVRx's time "
    "itself, or more: see the floors. NVRx flushes nothing; `nvrx, flushed` does."
)
_UNVERIFIED: Final = (
    "The floor sends the bytes once and compares no digest; the manager compares all."
)
_SPARES: Final = (
    "Faults follow each other so fast in these jobs that the next spare is often still starting, "
    "which takes seconds: `--steps-apart 300` lets it wait."
)
_WRITES: Final = (
    "A conversion writes as many bytes as it reads, and flushes them: `raw copy` of the same files "
    "misses this goal too."
)

_SAVE_LOAD_GOALS: Final = (
    Goal(
        "save_load",
        "zarr 1: durable save, of raw write+fsync",
        1.0,
        partial(_save_load, "durable save", "zarr 1", "raw write+fsync", is_in_memory=False),
        _IN_MEGATRON,
    ),
    Goal(
        "save_load",
        "zarr 1: save to memory, of raw write",
        1.25,
        partial(_save_load, "save", "zarr 1", "raw write", is_in_memory=True),
        _PER_ARRAY,
    ),
    Goal(
        "save_load",
        "zarr 1: save, of torch_dist",
        0.65,
        partial(_save_load, "save", "zarr 1", "torch_dist"),
    ),
    Goal(
        "save_load",
        "zarr 1: cold load, of raw read",
        1.1,
        partial(_save_load, "load cold", "zarr 1", "raw write+fsync", is_in_memory=False),
        _PER_ARRAY,
    ),
    Goal(
        "save_load",
        "zarr 1: warm load, of raw read",
        1.1,
        partial(_save_load, "load warm", "zarr 1", "raw write+fsync"),
        _PER_ARRAY,
    ),
    Goal(
        "save_load",
        "zarr 1: warm load, of torch_dist",
        0.5,
        partial(_save_load, "load warm", "zarr 1", "torch_dist"),
    ),
    Goal(
        "save_load",
        "zarr 1: cold load, of torch_dist",
        0.5,
        partial(_save_load, "load cold", "zarr 1", "torch_dist", is_in_memory=False),
        _DEVICE,
    ),
    Goal(
        "save_load",
        "zarr 2: durable save, of raw write+fsync",
        1.05,
        partial(_save_load, "durable save", "zarr 2", "raw write+fsync", is_in_memory=False),
        _PER_ARRAY,
    ),
    Goal(
        "save_load",
        "zarr 2: cold load, verified, of raw read",
        1.1,
        partial(_save_load, "load cold", "zarr 2", "raw write+fsync", is_in_memory=False),
        _PER_ARRAY,
    ),
    Goal(
        "save_load",
        "zarr 2: warm load, verified, of raw read",
        1.4,
        partial(_save_load, "load warm", "zarr 2", "raw write+fsync"),
        _VERIFIED,
    ),
)

_GROUP_GOALS: Final = (
    Goal(
        "two_stage",
        "two-stage load, of fully parallel",
        0.35,
        partial(_two_stage, "fully parallel"),
        _CORES,
    ),
    Goal("two_stage", "two-stage load, of the floor", 1.5, partial(_two_stage, "floor"), _CORES),
    Goal("scale_model", "two-stage load: planning", 5, partial(_planning, "seconds"), show=_s),
    Goal(
        "scale_model",
        "two-stage load: memory of planning",
        _GIB,
        partial(_planning, "memory_nbytes"),
        show=mib_text,
    ),
    Goal("reshard", "zarr 2 in another layout: bytes read, of those needed", 1.1, _reshard_bytes),
    Goal("reshard", "zarr 2 in another layout, of torch_dist", 1 / 3, _reshard, _ONE_CACHE),
)

_TRAINING_GOALS: Final = (
    Goal("async_save", "zarr 2: blocking part of a save, of memcpy", 1.3, _blocking),
    Goal("async_save", "zarr 2: slowest step beside a save, of an idle one", 1.05, _slowest_step),
    Goal(
        "local_replicated",
        "local: blocking part of a save, of memcpy",
        1.3,
        partial(_local, "blocking part", "floor"),
    ),
    Goal(
        "local_replicated",
        "local: save, of exchange and write",
        1.5,
        partial(_local, "save", "floor"),
    ),
    Goal("local_replicated", "local: save, of nvrx", 0.5, partial(_local, "save", "nvrx"), _NVRX),
    Goal(
        "local_replicated",
        "local: recovery, of read and exchange",
        1.5,
        partial(_local, "recovery", "floor"),
        _UNVERIFIED,
    ),
    Goal(
        "local_replicated",
        "local: recovery, of nvrx",
        0.5,
        partial(_local, "recovery", "nvrx"),
        _NVRX,
    ),
    Goal(
        "recovery_faults",
        "exception to next step",
        0.3,
        partial(_recovered, "exception", None),
        show=_s,
    ),
    Goal(
        "recovery_faults",
        "SIGKILL to next step, with a spare",
        1.0,
        partial(_recovered, "SIGKILL", 1),
        _SPARES,
        show=_s,
    ),
    Goal("recovery_overhead", "recovery: share of a step of 0.5 s", 0.01, _overhead, show=_percent),
)

_TOOL_GOALS: Final = (
    *(
        Goal("tools", f"{name}, of raw read", 1 / 0.7, partial(_tool, name), _WRITES)
        for name in ("verify", "to zarr 2", "to torch_dist")
    ),
    Goal("tools", "verify and convert: peak memory", _GIB, _tool_memory, show=mib_text),
)

ALL_GOALS: Final = (*_SAVE_LOAD_GOALS, *_GROUP_GOALS, *_TRAINING_GOALS, *_TOOL_GOALS)
