"""``dist-ckpt prune``: remove old checkpoints, and what killed saves have left."""

import math
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from dist_ckpt_strategies.cli.render import bytes_text, counted, print_json, print_table, printable
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.formats.course import KeepBest
from dist_ckpt_strategies.tools.prune import PruneDecision, PruneReport, prune

_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def prune_checkpoints(
    root: str,
    rules: Mapping[str, Any],
    *,
    older_than: str,
    dry_run: bool,
    is_agreed: bool,
    as_json: bool,
) -> None:
    """Show what would be removed, ask, and remove it.

    ``rules`` are the ``keep_`` and ``unfinished`` of the library's ``prune``. With
    ``as_json`` nothing is asked: it needs ``dry_run`` or ``is_agreed``.
    """
    pruned: Callable[..., PruneReport] = partial(
        prune, root, **rules, older_than_s=parse_duration_s(older_than)
    )
    if not any(rules.values()):
        raise PlanError(
            "nothing is selected: add --keep-last N, --keep-every N, --keep-best METRIC:MODE:N or "
            "--unfinished"
        )
    if as_json and not (dry_run or is_agreed):
        raise PlanError("--json does not prompt; add --yes, or --dry-run")
    if as_json:
        print_json("prune", _fields(pruned(dry_run=dry_run)))
        return
    console = Console(highlight=False)
    plan = pruned(dry_run=True)
    _print_plan(console, plan)
    if not dry_run and plan.removed and (is_agreed or _is_wanted(plan)):
        _print_removed(console, pruned(dry_run=False))


def parse_duration_s(text: str) -> float:
    """The seconds of a text such as ``90``, ``90s``, ``30m``, ``1h``, ``2d``; else a PlanError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not math.isfinite(float(match[1])):
        raise PlanError(
            f"--older-than: expected a duration such as 90s, 30m, 1h or 2d, found {text!r}"
        )
    return float(match[1]) * _UNIT_S[match[2]]


def parse_keep_best(text: str) -> KeepBest:
    """The rule of a text such as ``loss:min:3``; else a PlanError."""
    match text.rsplit(":", 2):
        case [metric, "min" | "max" as mode, count] if count.isdecimal() and int(count):
            return metric, mode, int(count)
    raise PlanError(f"--keep-best: expected METRIC:min:N or METRIC:max:N, found {text!r}")


def _is_wanted(plan: PruneReport) -> bool:
    """Whether a user at standard input says yes; a PlanError if that has ended, as in a job."""
    refused = "nothing was removed: the shell is not interactive; add --yes, or --dry-run"
    if sys.stdin is None:  # closed from the start
        raise PlanError(refused)
    try:
        return typer.confirm(f"Remove {_counted(plan)}?", err=True)
    except typer.Abort as error:
        typer.echo(err=True)
        if not isinstance(error.__context__, EOFError):
            raise KeyboardInterrupt from error
        raise PlanError(refused) from error


def _print_plan(console: Console, plan: PruneReport) -> None:
    removed = [(printable(one.name), "remove", _size(one), one.why) for one in plan.removed]
    kept = [(printable(one.name), "keep", "", one.why) for one in plan.kept]
    rows = tuple(sorted((*removed, *kept)))
    if rows:
        marked = {number for number, row in enumerate(rows) if row in removed}
        print_table(console, ("directory", "", "size", "why"), rows, ("size",), marked)
        console.print()
    outcome = f"{_counted(plan)} to remove" if removed else "nothing to remove"
    console.print(Text(f"{printable(str(plan.root))}: {outcome}"), soft_wrap=True)


def _print_removed(console: Console, done: PruneReport) -> None:
    console.print(Text(f"removed {_counted(done)}", "bold"), soft_wrap=True)
    for removal in done.removed:
        if removal.stays:
            names = printable(", ".join(removal.stays))
            text = f"{printable(removal.name)}: files that are no part of it stay: {names}"
            console.print(Text(text), soft_wrap=True)


def _size(removal: PruneDecision) -> str:
    return "unknown" if removal.nbytes is None else bytes_text(removal.nbytes)


def _counted(report: PruneReport) -> str:
    of = f" of {len(report.removed) + len(report.kept):,}"
    count = counted(len(report.removed), "checkpoint")
    is_known = all(removal.nbytes is not None for removal in report.removed)
    return f"{count}{of}, {'' if is_known else 'at least '}{bytes_text(report.nbytes)}"


def _fields(report: PruneReport) -> dict[str, Any]:
    return {
        "path": str(report.root),
        "dry_run": report.is_dry,
        "nbytes": report.nbytes,
        "removed": [
            {"name": one.name, "nbytes": one.nbytes, "why": one.why, "stays": one.stays}
            for one in report.removed
        ],
        "kept": [{"name": one.name, "status": one.status, "why": one.why} for one in report.kept],
    }
