"""Results files as the page reads them: lines, series of seconds, and what they amount to.

Everything is taken from the samples, so that a run that was cut short still tells what it has, and
every figure comes with its spread. Light to import: no torch, no matplotlib.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GB = 10**9
IN_MEMORY = frozenset({"tmpfs", "ramfs"})

Line = Mapping[str, Any]
Case = tuple[tuple[str, Any], ...]
"""Fields of a case, sorted by name: two samples of equal cases belong together."""


class ResultsError(ValueError):
    """A results file is not what a benchmark writes."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and what lies farthest from it on either side."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Stat:
    """What some rounds of one contender amount to.

    Attributes:
        contender: whose.
        num_rounds: how many.
        seconds: over the rounds.
        ratios: for each contender that others are compared with: over the rounds that both have,
            the ratio of the seconds to its seconds.
    """

    contender: str
    num_rounds: int
    seconds: Spread
    ratios: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class Found:
    """The results of one benchmark.

    Attributes:
        paths: the files, none where it has not been run.
        lines: all of them.
    """

    paths: tuple[Path, ...]
    lines: tuple[Line, ...]

    def of_kind(self, kind: str) -> list[Line]:
        """The lines of a kind, in order."""
        return [line for line in self.lines if line["kind"] == kind]

    def cases(self, kind: str = "sample") -> list[Case]:
        """The cases that lines of a kind have, in order of appearance."""
        return list(dict.fromkeys(case_of(line) for line in self.of_kind(kind)))

    def cases_and_steps(self) -> Iterator[tuple[Case, str]]:
        """The cases, each with all steps that its samples are of."""
        for case in self.cases():
            for step in dict.fromkeys(str(line["step"]) for line in self.samples(case)):
                yield case, step

    def samples(self, case: Case, step: str | None = None) -> list[Line]:
        """The samples of a case, and of one of its steps."""
        return [
            line
            for line in self.of_kind("sample")
            if case_of(line) == case and step in {None, line["step"]}
        ]


def find_results(directory: Path, stem: str) -> Found:
    """What a benchmark has left in a directory, in files that begin with its name.

    Raises:
        ResultsError: a line is not JSON.
    """
    paths = tuple(sorted(directory.glob(f"{stem}*.jsonl")))
    return Found(paths, tuple(line for path in paths for line in _lines(path)))


def case_of(line: Line) -> Case:
    """The case of a line."""
    return tuple(sorted(line["case"].items()))


def seconds_of(line: Line) -> float:
    """The seconds of a sample, in either of the forms that the benchmarks write."""
    values = line.get("values", line)
    return float(values["seconds"])


def summarise_rounds(
    samples: Iterable[Line],
    floors: Sequence[str],
    seconds: Callable[[Line], float | None] = seconds_of,
) -> list[Stat]:
    """One for each contender, the first floor before all others.

    Args:
        samples: of one step of one case.
        floors: contenders that all are compared with, as far as they took part.
        seconds: of a sample; None where it has none of the kind that is asked for.
    """
    by_name: dict[str, dict[int, float]] = {}
    for line in samples:
        found = seconds(line)
        if found is not None:
            by_name.setdefault(line["contender"], {})[int(line["repetition"])] = found
    names = sorted(by_name, key=lambda name: (name != floors[0], name))
    return [_stat(name, by_name, floors) for name in names]


def with_longest(samples: Sequence[Line], parts: Sequence[str], name: str) -> list[Line]:
    """The samples, and those of a floor that takes in each round as long as the longest part."""
    rounds: dict[int, list[Line]] = {}
    for line in samples:
        if line["contender"] in parts:
            rounds.setdefault(int(line["repetition"]), []).append(line)
    whole = [of_round for of_round in rounds.values() if len(of_round) == len(parts)]
    slowest: list[Line] = [max(of_round, key=seconds_of) for of_round in whole]
    longest = [{**line, "contender": name} for line in slowest]
    return [*longest, *samples]


def spread_of(values: Sequence[float]) -> Spread:
    """Median, least and greatest."""
    return Spread(statistics.median(values), min(values), max(values))


def _stat(name: str, by_name: Mapping[str, Mapping[int, float]], floors: Sequence[str]) -> Stat:
    own = by_name[name]
    ratios = {}
    for floor in floors:
        common = sorted(own.keys() & by_name.get(floor, {}).keys())
        if common:
            ratios[floor] = spread_of([own[number] / by_name[floor][number] for number in common])
    return Stat(name, len(own), spread_of(list(own.values())), ratios)


def _lines(path: Path) -> Iterator[Line]:
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield json.loads(text)
        except ValueError as error:
            raise ResultsError(f"{path}: line {number} is not JSON: {error}") from error
