"""``dist-ckpt inspect`` and ``dist-ckpt verify``: what a checkpoint of any kind holds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from dist_ckpt_strategies.cli.ranks import WatchOf, is_reporting, run_tool
from dist_ckpt_strategies.cli.render import (
    bytes_text,
    counted,
    open_bars,
    print_dim,
    print_json,
    print_table,
    printable,
)
from dist_ckpt_strategies.cli.status import Status, status_of_issues
from dist_ckpt_strategies.cli.summary import Summary, summary_of
from dist_ckpt_strategies.comm.shared_work import Ranks
from dist_ckpt_strategies.formats.commit import complete_commit
from dist_ckpt_strategies.formats.issues import Issue, Scan, Watch
from dist_ckpt_strategies.formats.scan import scan, verify
from dist_ckpt_strategies.local.scan import LocalScan, scan_local, verify_local
from dist_ckpt_strategies.storage.urls import StoreUrl, parsed_address

if TYPE_CHECKING:  # torch takes a while to import
    from dist_ckpt_strategies.comm.base import Communicator

_NUM_FIRST = 3
_MAX_PER_SECTION = 20
_LABEL_WIDTH = 12
_PROBLEM_WIDTH = 19


def inspect_checkpoint(
    address: str, keys: str | None, *, with_objects: bool, as_json: bool
) -> Status:
    """Show the arrays and objects of a checkpoint, or local shards; returns the exit status.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        ArrayNotFoundError: no key, or id of a local shard, matches the glob ``keys``.
    """
    found = _scanned(parsed_address(address, what="DIR"), None)
    summary = summary_of(found, keys, with_objects=with_objects)
    if as_json:
        _print_json("inspect", summary, {"complete": _is_fine(summary), **summary.lists})
    else:
        _print_inspection(summary)
    return status_of_issues(summary.issues)


def verify_checkpoint(address: str, *, nproc: int | None, as_json: bool) -> Status:
    """Check a checkpoint and show what is wrong with it; returns the exit status.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
    """
    began = time.monotonic()
    with open_bars() as open_bar:
        summary = run_tool(f"{__name__}:verified", {"address": address}, nproc, open_bar)
    seconds = time.monotonic() - began
    if is_reporting(nproc) and as_json:
        speed = summary.fields["nbytes"] / max(seconds, 1e-9)
        measured = {"seconds": seconds, "bytes_per_second": speed}
        _print_json("verify", summary, {"whole": _is_fine(summary), **measured})
    elif is_reporting(nproc):
        _print_verification(summary, seconds)
    return status_of_issues(summary.issues)


def verified(*, address: str, comm: Communicator | None, watch_of: WatchOf) -> Summary:
    """A checkpoint, with all that is wrong with it. Collective if ``comm`` has several ranks."""
    place, ranks = parsed_address(address, what="DIR"), Ranks(comm)
    if isinstance(place, Path):
        ranks.run_on_first(lambda: place.is_dir() and complete_commit(place))
    found = ranks.run(lambda: _scanned(place, watch_of("reading directories")))
    check: Callable[..., tuple[Issue, ...]] = (
        verify_local if isinstance(found, LocalScan) else verify
    )
    issues = check(found, watch_of("reading files"), comm=comm)
    return replace(summary_of(found), issues=issues)


def _scanned(place: Path | StoreUrl, watch: Watch | None) -> Scan | LocalScan:
    if isinstance(place, StoreUrl):
        # TensorStore takes a while to import, and directories go without.
        from dist_ckpt_strategies.formats.locations import located  # noqa: PLC0415

        return scan(located(str(place), None))
    return scan_local(place) or scan(place, watch)


def _is_fine(summary: Summary) -> bool | None:
    return None if summary.is_foreign else not summary.issues


def _print_json(command: str, summary: Summary, fields: Mapping[str, Any]) -> None:
    issues = {"findings": list(map(asdict, summary.issues))}
    print_json(command, {"path": summary.root, **summary.fields, **fields, **issues})


def _print_inspection(summary: Summary) -> None:
    console = Console(highlight=False)
    for table in summary.tables:
        if table.rows:
            print_table(console, table)
            console.print()
    _print_facts(console, (*summary.facts, ("complete", _completeness(summary))))
    for issue in summary.issues[:_NUM_FIRST]:
        console.print(Text(" " * _LABEL_WIDTH + printable(str(issue))), soft_wrap=True)


def _completeness(summary: Summary) -> str:
    if summary.is_foreign:
        return "not known; dist-ckpt looks into zarr 1 and zarr 2 only"
    if summary.unfinished:
        return f"NO, {summary.unfinished}"
    if summary.issues:
        issues = counted(len(summary.issues), "issue")
        return f"NO, {issues}; `dist-ckpt verify` lists them all"
    looked_at = "names and sizes" if summary.has_sizes else "names"
    return f"yes, by {looked_at}; `dist-ckpt verify` also reads the files"


def _print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    for label, text in facts:
        style = "red" if text.startswith("NO") else ""
        line = Text(f"{label:<{_LABEL_WIDTH}}", "bold") + Text(printable(text), style)
        console.print(line, soft_wrap=True)


def _print_verification(summary: Summary, seconds: float) -> None:
    console = Console(highlight=False)
    sections: dict[str, list[Issue]] = defaultdict(list)
    for issue in summary.issues:
        title = issue.path if summary.by_file else issue.key or "the checkpoint"
        sections[title].append(issue)
    for title, issues in sections.items():
        console.print(Text(printable(title), "bold"), soft_wrap=True)
        for issue in issues[:_MAX_PER_SECTION]:
            file = issue.path.removeprefix(f"{issue.key}/")
            where = issue.key if summary.by_file and issue.key else file
            text = f"{where}: expected {issue.expected}, found {issue.found}"
            label = issue.problem.value.replace("_", " ")
            line = f"  {label:<{_PROBLEM_WIDTH}}{printable(text)}"
            console.print(Text(line), soft_wrap=True)
        if len(issues) > _MAX_PER_SECTION:
            num_more = len(issues) - _MAX_PER_SECTION
            print_dim(console, f"  ... and {num_more:,} more; --json lists them")
    _print_facts(console, [fact for fact in summary.facts if fact[0] == "left over"])
    verdict = Text(f" {_verdict(summary)}", "bold red" if summary.issues else "bold green")
    console.print(Text(printable(summary.root)) + verdict, soft_wrap=True)
    if not summary.is_foreign:
        files = counted(summary.fields["num_files"], "file")
        size = f"{files}, {bytes_text(summary.fields['nbytes'])} in all"
        print_dim(console, f"checked: {summary.checked}; {size}, {seconds:.1f} s")


def _verdict(summary: Summary) -> str:
    if summary.is_foreign:
        return "cannot be verified: another backend wrote it"
    if summary.unfinished:
        return f"is NOT finished: {summary.unfinished}"
    if not summary.issues:
        return "is whole"
    files = counted(len({issue.path for issue in summary.issues}), "file")
    return f"is NOT whole: {counted(len(summary.issues), 'issue')} in {files}"
