"""``dist-ckpt convert``, ``upgrade`` and ``diff``."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from dist_ckpt_strategies.cli.progress import open_progress, watched
from dist_ckpt_strategies.cli.render import bytes_text, counted, print_dim, print_json, printable
from dist_ckpt_strategies.cli.status import Status
from dist_ckpt_strategies.config import MIB
from dist_ckpt_strategies.storage.urls import parsed_address
from dist_ckpt_strategies.tools.convert import ConvertOptions, ConvertReport, convert, upgrade
from dist_ckpt_strategies.tools.diff import (
    ArrayDifference,
    Difference,
    DiffReport,
    ObjectDifference,
    diff,
)

_MB = 1_000_000
_MAX_SHOWN = 100


def convert_checkpoint(  # noqa: PLR0913
    source: str,
    target: str,
    to: str,
    *,
    keys: str | None,
    memory: int,
    max_file: int | None,
    as_json: bool,
) -> None:
    """Convert a checkpoint, and report it.

    Args:
        source: directory or URL of the checkpoint.
        target: a new or empty directory, or a URL.
        to: the format.
        keys: a glob, for safetensors.
        memory: bound on elements in memory, in MiB.
        max_file: size of files that hold several arrays, in MB.
        as_json: print one JSON object.
    """
    options = ConvertOptions(memory * MIB, None if max_file is None else max_file * _MB)
    with open_progress(in_bytes=True) as progress:
        watch = watched(progress, "converting")
        report = convert(source, target, to, keys=keys, options=options, watch=watch)
    _print_report("convert", source, target, report, as_json=as_json)


def upgrade_checkpoint(
    source: str, target: str, to: str | None, *, memory: int, as_json: bool
) -> None:
    """Upgrade a checkpoint, and report it; see convert_checkpoint."""
    with open_progress(in_bytes=True) as progress:
        watch = watched(progress, "upgrading")
        options = ConvertOptions(memory * MIB)
        report = upgrade(source, target, to, options=options, watch=watch)
    _print_report("upgrade", source, target, report, as_json=as_json)


def diff_checkpoints(a: str, b: str, keys: str | None, *, memory: int, as_json: bool) -> Status:
    """Compare two checkpoints and show how they differ; returns the exit status.

    Args:
        a: directory or URL of the first.
        b: of the second.
        keys: a glob; then no objects are compared.
        memory: bound on elements in memory, in MiB.
        as_json: print one JSON object.
    """
    with open_progress(in_bytes=True) as progress:
        watch = watched(progress, "comparing")
        report = diff(a, b, keys=keys, options=ConvertOptions(memory * MIB), watch=watch)
    if as_json:
        print_json("diff", _diff_fields(a, b, report))
    else:
        _print_diff(a, b, report)
    return Status.FINE if report.is_equal else Status.DAMAGED


def _print_report(
    command: str, source: str, target: str, report: ConvertReport, *, as_json: bool
) -> None:
    if as_json:
        paths = {"source": _absolute(source), "target": _absolute(target)}
        print_json(command, paths | asdict(report))
        return
    arrays = f"{counted(report.num_arrays, 'array')} with {bytes_text(report.nbytes)}"
    text = f"{arrays}, {counted(report.num_objects, 'object shard')}; {report.seconds:.1f} s"
    console = Console(highlight=False)
    console.print(Text(printable(target), "bold green"), soft_wrap=True)
    print_dim(console, text)


def _absolute(address: str) -> str:
    return str(parsed_address(address))


def _diff_fields(a: str, b: str, report: DiffReport) -> dict[str, Any]:
    return {
        "a": _absolute(a),
        "b": _absolute(b),
        "equal": report.is_equal,
        "num_arrays": report.num_arrays,
        "num_objects": report.num_objects,
        "nbytes": report.nbytes,
        "arrays": list(map(_array_fields, report.arrays)),
        "objects": list(map(asdict, report.objects)),
    }


def _array_fields(found: ArrayDifference) -> dict[str, Any]:
    fields = asdict(found)
    largest = found.max_abs_difference
    if largest is not None and not math.isfinite(largest):
        fields["max_abs_difference"] = str(largest)  # JSON has no infinity
    return fields


def _print_diff(a: str, b: str, report: DiffReport) -> None:
    console = Console(highlight=False)
    lines = [*map(_array_line, report.arrays), *map(_object_line, report.objects)]
    for line in lines[:_MAX_SHOWN]:
        console.print(Text(printable(line)), soft_wrap=True)
    if len(lines) > _MAX_SHOWN:
        print_dim(console, f"... and {len(lines) - _MAX_SHOWN:,} more; --json lists them")
    verdict, style = ("are equal", "bold green") if report.is_equal else ("DIFFER", "bold red")
    names = Text(f"{printable(a)} and {printable(b)}")
    console.print(names + Text(f" {verdict}", style), soft_wrap=True)
    arrays = f"{counted(report.num_arrays, 'array')} with {bytes_text(report.nbytes)}"
    print_dim(console, f"compared: {arrays}, {counted(report.num_objects, 'object shard')}")


def _array_line(found: ArrayDifference) -> str:
    if found.difference is not Difference.VALUES:
        return _line(found.key, found)
    index = f"[{', '.join(map(str, found.index or ()))}]"
    limit = found.max_abs_difference
    largest = "not a number" if limit is None else f"{limit:g}"
    verb = "differs" if found.num_differing == 1 else "differ"
    return (
        f"{found.key}: {counted(found.num_differing, 'element')} {verb}, the first at {index}: "
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
