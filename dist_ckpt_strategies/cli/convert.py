"""``dist-ckpt convert``, ``copy``, ``upgrade`` and ``diff``."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from dist_ckpt_strategies.cli.ranks import is_reporting, tool_ranks
from dist_ckpt_strategies.cli.render import (
    bytes_text,
    counted,
    finite,
    open_bars,
    print_dim,
    print_json,
    printable,
)
from dist_ckpt_strategies.cli.status import Status
from dist_ckpt_strategies.config import MIB
from dist_ckpt_strategies.formats.locations import located
from dist_ckpt_strategies.tools.convert import ConvertReport, convert, copy, upgrade
from dist_ckpt_strategies.tools.diff import (
    ArrayDifference,
    Difference,
    DiffReport,
    ObjectDifference,
    diff,
)
from dist_ckpt_strategies.tools.options import ConvertOptions

_MB = 1_000_000
_MAX_SHOWN = 100


_TOOLS: Mapping[str, tuple[Callable[..., Any], str]] = {
    "convert": (convert, "converting"),
    "copy": (copy, "copying"),
    "upgrade": (upgrade, "upgrading"),
}


def convert_checkpoint(
    tool: str, arguments: dict[str, Any], nproc: int | None, *, as_json: bool
) -> Status:
    """Convert, copy or upgrade a checkpoint, as ``tool`` says; returns the exit status.

    The arguments are those of the library function, but ``memory`` is in MiB and ``max_file`` in
    MB. This process is one of ``nproc``.
    """
    function, description = _TOOLS[tool]
    report: ConvertReport = _run(function, description, arguments, nproc)
    source, target = arguments["source"], arguments["target"]
    if is_reporting(nproc) and as_json:
        paths = {"source": _absolute(source), "target": _absolute(target)}
        print_json(tool, paths | asdict(report))
    elif is_reporting(nproc):
        console = Console(highlight=False)
        for one in report.missing:
            text = one.why if one.why.startswith(one.key) else f"{one.key}: {one.why}"
            console.print(Text(printable(f"left out: {text}")), soft_wrap=True)
        console.print(Text(printable(target), "bold green"), soft_wrap=True)
        print_dim(console, f"{_compared(report)}; {report.seconds:.1f} s")
    return Status.DAMAGED if report.missing else Status.FINE


def diff_checkpoints(arguments: dict[str, Any], nproc: int | None, *, as_json: bool) -> Status:
    """Compare two checkpoints and show how they differ; returns the exit status.

    The arguments are as for ``convert_checkpoint``.
    """
    report: DiffReport = _run(diff, "comparing", arguments, nproc)
    if is_reporting(nproc) and as_json:
        print_json("diff", _diff_fields(arguments["a"], arguments["b"], report))
    elif is_reporting(nproc):
        _print_diff(arguments["a"], arguments["b"], report)
    return Status.FINE if report.is_equal else Status.DAMAGED


def _run(
    tool: Callable[..., Any], description: str, arguments: dict[str, Any], nproc: int | None
) -> Any:
    # Processes of one node share its cores.
    num_threads = None if nproc is None else max(2, ConvertOptions().threads // nproc)
    memory, max_file = arguments.pop("memory"), arguments.pop("max_file", None)
    options = ConvertOptions(memory and memory * MIB, max_file and max_file * _MB, num_threads)
    with open_bars(in_bytes=True) as open_bar, tool_ranks(nproc) as comm:
        return tool(**arguments, options=options, watch=open_bar(description), comm=comm)


def _compared(report: ConvertReport | DiffReport) -> str:
    arrays = f"{counted(report.num_arrays, 'array')} with {bytes_text(report.nbytes)}"
    return f"{arrays}, {counted(report.num_objects, 'object shard')}"


def _absolute(address: str) -> str:
    return str(located(address, None))


def _diff_fields(a: str, b: str, report: DiffReport) -> dict[str, Any]:
    fields = {"a": _absolute(a), "b": _absolute(b), "equal": report.is_equal, **asdict(report)}
    return fields | {"arrays": list(map(finite, fields["arrays"]))}


def _print_diff(a: str, b: str, report: DiffReport) -> None:
    console = Console(highlight=False)
    lines = [*map(_array_line, report.arrays), *map(_object_line, report.objects)]
    for line in lines[:_MAX_SHOWN]:
        console.print(Text(printable(line)), soft_wrap=True)
    if len(lines) > _MAX_SHOWN:
        print_dim(console, f"... and {len(lines) - _MAX_SHOWN:,} more; --json lists them")
    outcome, style = ("are equal", "bold green") if report.is_equal else ("DIFFER", "bold red")
    names = Text(f"{printable(a)} and {printable(b)}")
    console.print(names + Text(f" {outcome}", style), soft_wrap=True)
    renamed = f"; {report.num_renamed:,} as `upgrade` renames them" if report.num_renamed else ""
    print_dim(console, f"compared: {_compared(report)}{renamed}")


def _array_line(one: ArrayDifference) -> str:
    if one.difference is not Difference.VALUES:
        return _line(one.key, one)
    index, at = (f"[{', '.join(map(str, i or ()))}]" for i in (one.index, one.max_index))
    limit = one.max_abs_difference
    largest = "not a number" if limit is None else f"{limit:g} at {at}"
    verb = "differs" if one.num_differing == 1 else "differ"
    return (
        f"{one.key}: {counted(one.num_differing, 'element')} {verb}, the first at {index}: "
        f"{one.a} and {one.b}; largest absolute difference {largest}"
    )


def _object_line(one: ObjectDifference) -> str:
    return _line(f"{one.key}{': ' if one.where else ''}{one.where}", one)


def _line(name: str, one: ArrayDifference | ObjectDifference) -> str:
    if one.difference is Difference.ONLY_IN_A:
        return f"{name}: only in the first"
    if one.difference is Difference.ONLY_IN_B:
        return f"{name}: only in the second"
    if one.difference is Difference.DAMAGED:
        damage = zip(("first", "second"), (one.a, one.b), strict=True)
        return f"{name}: " + "; ".join(
            f"damaged in the {which}: {why}" for which, why in damage if why
        )
    kind = "" if one.difference is Difference.VALUES else f"{one.difference.value} "
    return f"{name}: {kind}{one.a} and {one.b}"
