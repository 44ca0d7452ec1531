"""Results files as the page reads them, and what the rounds of each candidate amount to.

Everything is computed from the samples, so a run that was cut short still counts. Light to import.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

Line = Mapping[str, Any]
Case = tuple[tuple[str, Any], ...]
"""Fields of a case, sorted by name: samples of equal cases belong together."""


class ResultsError(ValueError):
    """A results file is not what a benchmark writes."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, the least and the greatest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of some values."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Stat:
    """What the rounds of one candidate amount to.

    Attributes:
        candidate: its name.
        num_rounds: how many rounds count.
        seconds: over the rounds.
        ratios: for each baseline, its ratios of seconds over the rounds that both have.
    """

    candidate: str
    num_rounds: int
    seconds: Spread
    ratios: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class Found:
    """The lines that one benchmark has left; none where it has not run."""

    lines: tuple[Line, ...]

    def of_kind(self, kind: str) -> list[Line]:
        """The lines of a kind, in order."""
        return [line for line in self.lines if line["kind"] == kind]

    def groups(self) -> dict[tuple[Case, str], list[Line]]:
        """The samples of each case and step, in order of appearance."""
        found: dict[tuple[Case, str], list[Line]] = {}
        for line in self.of_kind("sample"):
            key = tuple(sorted(line["case"].items())), str(line["step"])
            found.setdefault(key, []).append(line)
        return found


def find_results(directory: Path, stem: str) -> Found:
    """What a benchmark has left in a directory, in files whose names begin with its own.

    Raises:
        ResultsError: a line is not JSON.
    """
    paths = sorted(directory.glob(f"{stem}*.jsonl"))
    return Found(tuple(line for path in paths for line in _lines(path)))


def _lines(path: Path) -> Iterator[Line]:
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield json.loads(text)
        except ValueError as error:
            raise ResultsError(f"{path}: line {number} is not JSON: {error}") from error


def value_of(line: Line, name: str = "seconds") -> float | None:
    """A value of a sample; older runs have them beside the other fields."""
    return line.get("values", line).get(name)  # type: ignore[no-any-return]


def summarise_rounds(
    samples: Iterable[Line], baselines: Sequence[str], name: str = "seconds"
) -> list[Stat]:
    """One Stat for each candidate, the first baseline before all others.

    Args:
        samples: of one step of one case.
        baselines: candidates that all are compared with.
        name: of the seconds; samples without them do not count.
    """
    by_name: dict[str, dict[int, float]] = {}
    for line in samples:
        found = value_of(line, name)
        if found is not None:
            by_name.setdefault(line["candidate"], {})[int(line["repetition"])] = found
    stats = []
    for candidate in sorted(by_name, key=lambda one: (one != baselines[0], one)):
        own, ratios = by_name[candidate], {}
        for baseline in baselines:
            other = by_name.get(baseline, {})
            if common := sorted(own.keys() & other.keys()):
                ratios[baseline] = Spread.of([own[n] / other[n] for n in common])
        stats.append(Stat(candidate, len(own), Spread.of(list(own.values())), ratios))
    return stats


def with_longest(samples: Sequence[Line], parts: Sequence[str], name: str) -> list[Line]:
    """The samples, and those of a baseline that takes as long as the longest part of each round."""
    rounds: dict[int, list[Line]] = {}
    for line in samples:
        if line["candidate"] in parts:
            rounds.setdefault(int(line["repetition"]), []).append(line)
    whole = [of_round for of_round in rounds.values() if len(of_round) == len(parts)]
    longest = [max(of_round, key=lambda line: value_of(line) or 0.0) for of_round in whole]
    return [*({**line, "candidate": name} for line in longest), *samples]
