"""``dist-ckpt diff``: what two checkpoints do not have in common."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from dist_ckpt_strategies.cli.json_form import SCHEMA
from dist_ckpt_strategies.cli.locations import place_text
from dist_ckpt_strategies.cli.progress import open_byte_progress, watched
from dist_ckpt_strategies.cli.text import bytes_text, counted, printable
from dist_ckpt_strategies.config import MIB
from dist_ckpt_strategies.run.diff import (
    ArrayDifference,
    Difference,
    DiffReport,
    ObjectDifference,
)
from dist_ckpt_strategies.strategies.convert import ConvertOptions
from dist_ckpt_strategies.strategies.diff import diff

STATUS_EQUAL = 0
STATUS_DIFFERENT = 1

_MAX_SHOWN = 100


def diff_checkpoints(a: str, b: str, keys: str | None, *, memory: int, as_json: bool) -> int:
    """Compare two checkpoints and show how they differ; returns the exit status.

    Args:
        a: directory or URL of the first.
        b: of the second.
        keys: a glob; then no objects are compared.
        memory: bound on elements in memory, in MiB.
        as_json: print one JSON object.
    """
    with open_byte_progress() as progress:
        watch = watched(progress, "comparing")
        report = diff(a, b, keys=keys, options=ConvertOptions(memory * MIB), watch=watch)
    if as_json:
        _print_json(a, b, report)
    else:
        _print_lists(Console(highlight=False), a, b, report)
    return STATUS_EQUAL if report.is_equal else STATUS_DIFFERENT


def _print_json(a: str, b: str, report: DiffReport) -> None:
    fields = {
        "schema": SCHEMA,
        "command": "diff",
        "a": place_text(a),
        "b": place_text(b),
        "equal": report.is_equal,
        "num_arrays": report.num_arrays,
        "num_objects": report.num_objects,
        "nbytes": report.nbytes,
        "arrays": [_array_fields(found) for found in report.arrays],
        "objects": [asdict(found) for found in report.objects],
    }
    typer.echo(json.dumps(fields, indent=2, allow_nan=False))


def _array_fields(found: ArrayDifference) -> dict[str, Any]:
    """The fields; JSON has no infinity, so that it is text."""
    fields = asdict(found)
    largest = found.max_abs_difference
    if largest is not None and not math.isfinite(largest):
        fields["max_abs_difference"] = str(largest)
    return fields


def _print_lists(console: Console, a: str, b: str, report: DiffReport) -> None:
    lines = [_array_line(found) for found in report.arrays]
    lines += [_object_line(found) for found in report.objects]
    _print_some(console, lines)
    compared = (
        f"compared: {counted(report.num_arrays, 'array')} with {bytes_text(report.nbytes)}, "
        f"{counted(report.num_objects, 'object shard')}"
    )
    names = f"{printable(a)} and {printable(b)}"
    verdict, style = ("are equal", "bold green") if report.is_equal else ("DIFFER", "bold red")
    console.print(Text(names) + Text(f" {verdict}", style), soft_wrap=True)
    console.print(Text(compared, "dim"), soft_wrap=True)


def _print_some(console: Console, lines: Sequence[str]) -> None:
    for line in lines[:_MAX_SHOWN]:
        console.print(Text(printable(line)), soft_wrap=True)
    if len(lines) > _MAX_SHOWN:
        more = f"... and {len(lines) - _MAX_SHOWN:,} more; --json lists them"
        console.print(Text(more, "dim"), soft_wrap=True)


def _array_line(found: ArrayDifference) -> str:
    if found.difference is not Difference.VALUES:
        return _line(found.key, found)
    place = f"[{', '.join(map(str, found.index or ()))}]"
    limit = found.max_abs_difference
    largest = "not a number" if limit is None else f"{limit:g}"
    verb = "differs" if found.num_differing == 1 else "differ"
    return (
        f"{found.key}: {counted(found.num_differing, 'element')} {verb}, the first at {place}: "
        f"{found.a} and {found.b}; largest absolute difference {largest}"
    )


def _object_line(found: ObjectDifference) -> str:
    return _line(f"{found.key}{': ' if found.where else ''}{found.where}", found)


def _line(name: str, found: ArrayDifference | ObjectDifference) -> str:
    if found.difference is Difference.ONLY_IN_A:
        return f"{name}: only in the first"
    if found.difference is Difference.ONLY_IN_B:
        return f"{name}: only in the second"
    what = "" if found.difference is Difference.VALUES else f"{found.difference.value} "
    return f"{name}: {what}{found.a} and {found.b}"
