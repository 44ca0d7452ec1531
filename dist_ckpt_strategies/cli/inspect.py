"""``dist-ckpt inspect`` and ``verify``, of packs, ("zarr", 1) and local ones; ``rebuild-index``."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import typer
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
    print_table,
    printable,
    shape_text,
)
from dist_ckpt_strategies.cli.status import Status, status_of_issues
from dist_ckpt_strategies.cli.summary import Summary, summary_of
from dist_ckpt_strategies.comm.shared_work import Ranks, Watch
from dist_ckpt_strategies.errors import ArrayNotFoundError, some_of
from dist_ckpt_strategies.formats.issues import Issue, Scan
from dist_ckpt_strategies.formats.locations import Location, located
from dist_ckpt_strategies.formats.pack import UNVERIFIED
from dist_ckpt_strategies.formats.rebuild import rebuild_index
from dist_ckpt_strategies.formats.scan import scan, verify
from dist_ckpt_strategies.local.scan import LocalScan, scan_local, verify_local
from dist_ckpt_strategies.tools.options import ConvertOptions

_NUM_FIRST = 3
_MAX_PER_SECTION = 20
_LABEL_WIDTH = 12
_PROBLEM_WIDTH = 19
_LACKING = " of "
_UNKNOWN = "?"
_FIGURES = ("min", "max", "mean", "nan", "zeros")
_RIGHT = ("files", "blocks", "shards", "copies", "owner", "ranks", "tensors", "size")
_NOT_LOOKED_INTO = (
    "dist-ckpt looks into packs and zarr 1 only; "
    "`dist-ckpt diff` and `convert` read zarr 3 and torch_dist too"
)


def inspect_checkpoint(
    address: str, keys: str | None, *, with_objects: bool, as_json: bool
) -> Status:
    """Show the arrays and objects of a checkpoint, or local shards; returns the exit status."""
    scanned = _scanned(located(address, None, what="DIR"), None)
    summary = summary_of(scanned, keys, with_objects=with_objects)
    if as_json:
        _print_json("inspect", summary, {"complete": summary.is_fine, **summary.lists})
    else:
        _print_inspection(summary)
    return status_of_issues(summary.issues)


def inspect_stats(address: str, keys: str | None, *, as_json: bool) -> Status:
    """Show figures about the elements of a checkpoint's arrays; returns the exit status."""
    from dist_ckpt_strategies.tools.stats import stats_of  # noqa: PLC0415

    options = ConvertOptions()
    opened = options.open(address, ())
    matching = [key for key in opened if keys is None or fnmatchcase(key, keys)]
    if keys is not None and not matching:
        raise ArrayNotFoundError(f"{opened.root}: none of its {len(opened)} keys matches {keys!r}")
    with open_bars(in_bytes=True) as open_bar:
        rows = [asdict(one) for one in stats_of(opened, matching, options, open_bar("reading"))]
    if as_json:
        print_json("inspect", {"path": str(opened.root), "stats": list(map(finite, rows))})
        return Status.FINE
    texts = [
        [printable(row.pop("key")), *(_UNKNOWN if n is None else f"{n:.6g}" for n in row.values())]
        for row in rows
    ]
    print_table(Console(highlight=False), ["array", *_FIGURES], texts, _FIGURES)
    return Status.FINE


def verify_checkpoint(address: str, *, nproc: int | None, as_json: bool) -> Status:
    """Check a checkpoint and show what is wrong with it; returns the exit status."""
    began = time.monotonic()
    place = located(address, None, what="DIR")
    with open_bars() as open_bar, tool_ranks(nproc) as comm:
        ranks = Ranks(comm)
        scanned = ranks.run(lambda: _scanned(place, open_bar("reading directories")))
        check: Callable[..., tuple[Issue, ...]] = (
            verify_local if isinstance(scanned, LocalScan) else verify
        )
        issues = check(scanned, open_bar("reading files"), comm=comm)
    summary = replace(summary_of(scanned), issues=issues)
    seconds = time.monotonic() - began
    if is_reporting(nproc) and as_json:
        speed = summary.fields["nbytes"] / max(seconds, 1e-9)
        measured = {"seconds": seconds, "bytes_per_second": speed}
        _print_json("verify", summary, {"whole": summary.is_fine, **measured})
    elif is_reporting(nproc):
        _print_verification(summary, seconds)
    return status_of_issues(summary.issues)


def rebuild(address: str, *, is_forced: bool, as_json: bool) -> None:
    """Make the index of packs anew, and show for which save."""
    place = located(address, None)
    rebuilt = rebuild_index(place, force=is_forced)
    if as_json:
        fields = {"rebuilt": rebuilt is not None} | (asdict(rebuilt) if rebuilt else {})
        print_json("rebuild-index", {"path": str(place), **fields})
        return
    if rebuilt is None:
        typer.echo(printable(f"{place}: the index is whole, and stays"))
        return
    for text in rebuilt.passed_over:
        typer.echo(printable(f"passed over: {text}"))
    counts = f"{counted(rebuilt.num_packs, 'pack')}, {counted(rebuilt.num_arrays, 'array')} and "
    counts += counted(rebuilt.num_objects, "object")
    save = f"save {rebuilt.save_id}" if rebuilt.save_id else "a save without an id"
    typer.echo(printable(f"{place}: made the index of {save}: {counts}"))


def _scanned(place: Location, watch: Watch | None) -> Scan | LocalScan:
    return (isinstance(place, Path) and scan_local(place)) or scan(place, watch)


def _print_json(command: str, summary: Summary, fields: Mapping[str, Any]) -> None:
    issues = {"issues": list(map(asdict, summary.issues))}
    print_json(command, {**summary.fields, **fields, **issues})


def _print_inspection(summary: Summary) -> None:
    console = Console(highlight=False)
    for name, listed in summary.lists.items():
        if listed:
            _print_rows(console, list(map(_ROWS[name], listed)))
            console.print()
    _print_lines(console, (*summary.lines, ("complete", _completeness(summary))))
    for issue in summary.shown_issues[:_NUM_FIRST]:
        console.print(Text(" " * _LABEL_WIDTH + printable(str(issue))), soft_wrap=True)


def _completeness(summary: Summary) -> str:
    if summary.is_foreign:
        return f"not known; {_NOT_LOOKED_INTO}"
    if summary.issues:
        issues = counted(len(summary.issues), "issue")
        return f"NO, {issues}; `dist-ckpt verify` lists them all"
    is_directory = isinstance(located(summary.fields["path"], None), Path)
    looked_at = "names and sizes" if is_directory else "names"  # as an object store lists them
    if summary.is_local:
        text = f"what is here is, by {looked_at}; other nodes are not seen"
    else:
        text = f"yes, by {looked_at}"
    return f"{text}; `dist-ckpt verify` also reads the files"


def _print_lines(console: Console, lines: Sequence[tuple[str, str]]) -> None:
    for label, text in lines:
        style = "red" if text.startswith("NO") else ""
        line = Text(f"{label:<{_LABEL_WIDTH}}", "bold") + Text(printable(text), style)
        console.print(line, soft_wrap=True)


def _print_verification(summary: Summary, seconds: float) -> None:
    console = Console(highlight=False)
    sections: dict[str, list[Issue]] = defaultdict(list)
    for issue in summary.shown_issues:
        title = issue.path if summary.is_local else issue.key or "the checkpoint"
        sections[title].append(issue)
    for title, issues in sections.items():
        console.print(Text(printable(title), "bold"), soft_wrap=True)
        for issue in issues[:_MAX_PER_SECTION]:
            file = issue.path.removeprefix(f"{issue.key}/")
            where = issue.key if summary.is_local and issue.key else file
            text = f"{where}: expected {issue.expected}, found {issue.found}"
            label = issue.problem.value.replace("_", " ")
            line = f"  {label:<{_PROBLEM_WIDTH}}{printable(text)}"
            console.print(Text(line), soft_wrap=True)
        if len(issues) > _MAX_PER_SECTION:
            num_more = len(issues) - _MAX_PER_SECTION
            print_dim(console, f"  ... and {num_more:,} more; --json lists them")
    _print_lines(console, [line for line in summary.lines if line[0] in {"left over", UNVERIFIED}])
    outcome = Text(f" {_outcome(summary)}", "bold red" if summary.issues else "bold green")
    console.print(Text(printable(summary.fields["path"])) + outcome, soft_wrap=True)
    if not summary.is_foreign:
        files = counted(summary.fields["num_files"], "file")
        size = f"{files}, {bytes_text(summary.fields['nbytes'])} in all"
        print_dim(console, f"checked: {summary.checked}; {size}, {seconds:.1f} s")


def _outcome(summary: Summary) -> str:
    if summary.is_foreign:
        marker = summary.fields["marker"]
        backend = f"{marker['sharded_backend']} {marker['sharded_backend_version']}"
        return f"cannot be verified: it is {backend}; {_NOT_LOOKED_INTO}"
    if not summary.issues:
        return "is whole, as far as it is on this node" if summary.is_local else "is whole"
    files = counted(len({issue.path for issue in summary.issues}), "file")
    return f"is NOT whole: {counted(len(summary.issues), 'issue')} in {files}"


def _array_row(fields: Mapping[str, Any]) -> dict[str, str]:
    return {
        "array": printable(fields["key"]),
        "shape": shape_text(fields["shape"]),
        "dtype": fields["dtype"],
        "chunk": shape_text(fields["chunk_shape"]) if "chunk_shape" in fields else "",
        "files": _present(fields["num_chunks"], fields["num_chunks_expected"])
        if "num_chunks" in fields
        else "",
        "blocks": f"{fields['num_blocks']:,}" if "num_blocks" in fields else "",
        "size": bytes_text(fields.get("file_nbytes", fields["nbytes"])),
        "writers": _ranks(fields.get("writers", ())),
    }


def _object_row(fields: Mapping[str, Any]) -> dict[str, str]:
    return {
        "object": printable(fields["key"]),
        "grid": shape_text(fields["shape"]),
        "shards": _present(fields["num_shards"], fields["num_shards_expected"]),
        "size": bytes_text(fields["file_nbytes"]),
        "writers": _ranks(fields["writers"]),
    }


def _print_rows(console: Console, rows: Sequence[Mapping[str, str]]) -> None:
    """Rows that lack files are marked; columns without any text are left out."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    texts = [[row[title] for title in titles] for row in rows]
    lacking = (_LACKING in row.get("files", row.get("shards", "")) for row in rows)
    print_table(console, titles, texts, _RIGHT, {n for n, lacks in enumerate(lacking) if lacks})


def _present(present: int, expected: int) -> str:
    return f"{present:,}" if present == expected else f"{present:,}{_LACKING}{expected:,}"


def _ranks(ranks: Sequence[int]) -> str:
    """Such as ``0-3, 8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return some_of(["-".join(map(str, run)) for run in runs])


def _shard_row(fields: Mapping[str, Any]) -> dict[str, str]:
    return {
        "local shard": fields["id"],
        "owner": str(fields["owner"]),
        "ranks": _known(fields["world_size"]),
        "held by": ", ".join(str(copy["holder"]) for copy in fields["copies"]),
        "kind": _known(fields["kind"]),
        "tensors": _known(fields["num_tensors"]),
        "size": bytes_text(sum(copy["nbytes"] for copy in fields["copies"])),
    }


def _save_row(fields: Mapping[str, Any]) -> dict[str, str]:
    return {
        "iteration": str(fields["iteration"]),
        "ranks here": f"{len(fields['owners']):,} of {_known(fields['world_size'])}",
        "copies": f"{fields['num_copies']:,}",
        "session": _known(fields["session"]),
        "size": bytes_text(fields["nbytes"]),
        "save": fields["save_id"],
    }


def _known(value: int | str | None) -> str:
    return _UNKNOWN if value is None else printable(str(value))


_ROWS = {
    "arrays": _array_row,
    "objects": _object_row,
    "iterations": _save_row,
    "parts": _shard_row,
}
