"""Run a benchmark's script at toy size."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import finished

_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@dataclass(frozen=True)
class Results:
    """The lines that a run wrote, and what it left behind where it worked."""

    lines: list[dict[str, Any]]
    left: list[Path]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]


def command(script: str, directory: Path | None, *options: str) -> list[str]:
    place = () if directory is None else ("--directory", str(directory))
    return [sys.executable, str(_BENCHMARKS / script), *place, *options]


def results_of(
    script: str,
    directory: Path,
    *options: str,
    limit_s: float = 250,
    takes_directory: bool = True,
) -> Results:
    """Of a run that works in one new directory below ``directory``, and writes to another."""
    place, out = directory / "place", directory / "results.jsonl"
    place.mkdir()
    where = place if takes_directory else None
    line = command(script, where, "--smoke", "--out", str(out), *options)
    finished(*line, limit_s=limit_s)
    texts = out.read_text(encoding="utf-8").splitlines()
    return Results([json.loads(text) for text in texts], list(place.iterdir()))
