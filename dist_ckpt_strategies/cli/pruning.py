"""``dist-ckpt prune``: remove old checkpoints, and what killed saves have left."""

from __future__ import annotations

import math
import re
from dataclasses import asdict

import typer
from rich.console import Console
from rich.text import Text

from dist_ckpt_strategies.cli.columns import Row, print_list
from dist_ckpt_strategies.cli.json_form import print_json
from dist_ckpt_strategies.cli.text import bytes_text, counted, printable
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.plan.prune import Keeping
from dist_ckpt_strategies.run.prune import PruneReport, Removal, prune

STATUS_FINE = 0
STATUS_DECLINED = 1

_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_duration_s(text: str) -> float:
    """Such as ``90``, ``90s``, ``30m``, ``1h``, ``2d``; in seconds.

    Raises:
        PlanError: it is nothing like that.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None or not math.isfinite(float(found[1])):
        raise PlanError(f"{text!r} is no duration; expected such as 90s, 30m, 1h or 2d")
    return float(found[1]) * _UNIT_S[found[2]]


def prune_checkpoints(
    root: str, keeping: Keeping, *, dry_run: bool, is_agreed: bool, as_json: bool
) -> int:
    """Show what goes, ask, and remove it; returns the exit status.

    Args:
        root: holds the checkpoints.
        keeping: what is to stay.
        dry_run: only show.
        is_agreed: do not ask.
        as_json: print one JSON object; it does not ask either, so something has to agree.

    Raises:
        PlanError: nothing is said that could make anything go, or nobody could be asked.
        StorageError: something cannot be read or removed.
    """
    if keeping.last is None and keeping.every is None and not keeping.removes_unfinished:
        raise PlanError("say what goes: --keep-last N, --keep-every N or --unfinished")
    if as_json and not (dry_run or is_agreed):
        raise PlanError("--json does not ask; add --yes, or --dry-run")
    if as_json:
        _print_json(_pruned(root, keeping, dry_run=dry_run))
        return STATUS_FINE
    console = Console(highlight=False)
    plan = _pruned(root, keeping, dry_run=True)
    _print_plan(console, plan)
    if dry_run or not plan.removed:
        return STATUS_FINE
    if not (is_agreed or _is_wanted(plan)):
        return STATUS_DECLINED
    done = _pruned(root, keeping, dry_run=False)
    console.print(Text(f"removed {_counted(done)}", "bold"), soft_wrap=True)
    for removal in done.removed:
        if removal.stays:
            names = printable(", ".join(removal.stays))
            text = f"{printable(removal.name)} stays, for what is no part of it: {names}"
            console.print(Text(text), soft_wrap=True)
    return STATUS_FINE


def _is_wanted(plan: PruneReport) -> bool:
    """Whether somebody at standard input says yes.

    Raises:
        PlanError: nobody is there, as in a job.
    """
    try:
        return typer.confirm(f"Remove {_counted(plan)}?", err=True)
    except typer.Abort as error:
        if not isinstance(error.__context__, EOFError):
            typer.echo(err=True)
            raise KeyboardInterrupt from error
        typer.echo(err=True)
        raise PlanError(
            "nothing was removed: standard input has no answer; add --yes, or --dry-run"
        ) from error


def _pruned(root: str, keeping: Keeping, *, dry_run: bool) -> PruneReport:
    return prune(
        root,
        keep_last=keeping.last,
        keep_every=keeping.every,
        unfinished=keeping.removes_unfinished,
        older_than_s=keeping.older_than_s,
        dry_run=dry_run,
    )


def _print_plan(console: Console, plan: PruneReport) -> None:
    goes = [
        Row(printable(one.name), ("goes", _size(one), one.why), is_marked=True)
        for one in plan.removed
    ]
    stays = [Row(printable(one.found.name), ("stays", "", one.why)) for one in plan.kept]
    if goes or stays:
        rows = sorted((*goes, *stays), key=lambda row: row.name)
        print_list(console, Row("directory", ("", "size", "why")), rows, right=("size",))
        console.print()
    root = printable(str(plan.root))
    if not plan.removed:
        console.print(Text(f"{root}: nothing goes"), soft_wrap=True)
        return
    console.print(Text(f"{root}: {_counted(plan)} to go"), soft_wrap=True)


def _size(removal: Removal) -> str:
    return "unknown" if removal.nbytes is None else bytes_text(removal.nbytes)


def _counted(report: PruneReport) -> str:
    of = f" of {len(report.removed) + len(report.kept):,}"
    count = counted(len(report.removed), "checkpoint")
    is_known = all(removal.nbytes is not None for removal in report.removed)
    return f"{count}{of}, {'' if is_known else 'at least '}{bytes_text(report.nbytes)}"


def _print_json(report: PruneReport) -> None:
    fields = {
        "dry_run": report.is_dry,
        "nbytes": report.nbytes,
        "removed": [asdict(removal) for removal in report.removed],
        "kept": [
            {"name": one.found.name, "standing": one.found.standing.value, "why": one.why}
            for one in report.kept
        ],
    }
    print_json("prune", str(report.root), fields)
