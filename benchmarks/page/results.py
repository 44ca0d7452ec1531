"""Results files as the page reads them. Light to import."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


class ResultsError(ValueError):
    """A results file is not what a benchmark writes."""


@dataclass(frozen=True, slots=True)
class Found:
    """The lines that one benchmark has left; none where it has not run."""

    lines: tuple[Line, ...]

    def of_kind(self, kind: str) -> list[Line]:
        """The lines of a kind, in order."""
        return [line for line in self.lines if line["kind"] == kind]

    def groups(self) -> Iterator[tuple[dict[str, Any], str, list[Line]]]:
        """Case, step and samples, in order of appearance; equal cases belong together."""
        found: dict[tuple[tuple[tuple[str, Any], ...], str], list[Line]] = {}
        for line in self.of_kind("sample"):
            key = tuple(sorted(line["case"].items())), str(line["step"])
            found.setdefault(key, []).append(line)
        return ((dict(case), step, samples) for (case, step), samples in found.items())


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
