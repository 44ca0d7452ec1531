"""``dist-ckpt verify``: whether a checkpoint is whole, and what is not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from dist_ckpt_strategies.cli import format2
from dist_ckpt_strategies.cli.columns import print_wrapped
from dist_ckpt_strategies.cli.json_form import finding_fields, print_json, summary_fields
from dist_ckpt_strategies.cli.locations import location_of, survey_of
from dist_ckpt_strategies.cli.parts import show_verdict
from dist_ckpt_strategies.cli.text import bytes_text, counted, printable
from dist_ckpt_strategies.storage.findings import Finding, Watch
from dist_ckpt_strategies.storage.format2_survey import (
    Format2Survey,
    check_format2,
    survey_format2,
)
from dist_ckpt_strategies.storage.part_survey import PartSurvey, check_parts, survey_parts
from dist_ckpt_strategies.storage.survey import Survey, check_survey, survey_checkpoint

STATUS_WHOLE = 0
STATUS_DAMAGED = 1

_MAX_PER_KEY = 20
_LABEL_WIDTH = 19


def verify_checkpoint(address: str, *, as_json: bool) -> int:
    """Check a checkpoint and show what is wrong with it; returns the exit status.

    Args:
        address: directory or URL of the checkpoint, or a directory of local ones.
        as_json: print one JSON object.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
    """
    began = time.monotonic()
    directory = location_of(address)
    if not isinstance(directory, Path):
        return _verify_format2(survey_of(directory), began, as_json=as_json)
    if local := survey_parts(directory):
        return _verify_parts(local, began, as_json=as_json)
    if recorded := survey_format2(directory):
        return _verify_format2(recorded, began, as_json=as_json)
    return _verify_format1(directory, began, as_json=as_json)


def _verify_parts(survey: PartSurvey, began: float, *, as_json: bool) -> int:
    with _open_progress() as progress:
        findings = check_parts(survey, _watch(progress, "comparing digests"))
    show_verdict(survey, findings, time.monotonic() - began, as_json=as_json)
    return STATUS_DAMAGED if findings else STATUS_WHOLE


def _verify_format1(directory: Path, began: float, *, as_json: bool) -> int:
    with _open_progress() as progress:
        survey = survey_checkpoint(directory, _watch(progress, "looking at directories"))
        findings = check_survey(survey, _watch(progress, "reading objects"))
    seconds = time.monotonic() - began
    if as_json:
        whole = None if survey.is_foreign else not findings
        fields = {"whole": whole, "findings": list(map(finding_fields, findings))}
        print_json("verify", survey.root, summary_fields(survey) | fields)
    else:
        console = Console(highlight=False)
        _print_findings(console, findings)
        _print_verdict(console, survey, findings, seconds)
    return STATUS_DAMAGED if findings else STATUS_WHOLE


def _verify_format2(survey: Format2Survey, began: float, *, as_json: bool) -> int:
    with _open_progress() as progress:
        findings = check_format2(survey, _watch(progress, "comparing digests"))
    format2.show_verdict(survey, findings, time.monotonic() - began, as_json=as_json)
    return STATUS_DAMAGED if findings else STATUS_WHOLE


def _open_progress() -> Progress:
    """Bars on stderr while they are of use; nothing where it is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _watch(progress: Progress, description: str) -> Watch:
    task = progress.add_task(description, total=None)
    return lambda done, total: progress.update(task, completed=done, total=total)


def _print_findings(console: Console, findings: Sequence[Finding]) -> None:
    for key, of_key in groupby(findings, lambda finding: finding.key):
        listed = list(of_key)
        console.print(Text(printable(key) if key else "the checkpoint", "bold"), soft_wrap=True)
        for finding in listed[:_MAX_PER_KEY]:
            _print_finding(console, finding)
        if len(listed) > _MAX_PER_KEY:
            more = f"  ... and {len(listed) - _MAX_PER_KEY:,} more; --json lists them"
            console.print(Text(more, "dim"), soft_wrap=True)


def _print_finding(console: Console, finding: Finding) -> None:
    label = finding.problem.value.replace("_", " ")
    file = finding.path.removeprefix(f"{finding.key}/")
    text = printable(f"{file}: expected {finding.expected}, found {finding.found}")
    print_wrapped(console, text, f"  {label:<{_LABEL_WIDTH}}", " " * (2 + _LABEL_WIDTH))


def _print_verdict(
    console: Console, survey: Survey, findings: Sequence[Finding], seconds: float
) -> None:
    root = printable(str(survey.root))
    if survey.is_foreign:
        verdict, style = "cannot be verified: another backend wrote it", "bold red"
    elif findings:
        num_keys = len({finding.key for finding in findings})
        counts = f"{counted(len(findings), 'finding')} in {counted(num_keys, 'place')}"
        verdict, style = f"is NOT whole: {counts}", "bold red"
    else:
        verdict, style = "is whole", "bold green"
    console.print(Text(root) + Text(f" {verdict}", style), soft_wrap=True)
    if not survey.is_foreign:
        console.print(Text(_checked(survey, seconds), "dim"), soft_wrap=True)


def _checked(survey: Survey, seconds: float) -> str:
    chunks = sum(stored.num_chunks for stored in survey.arrays)
    arrays = f"{counted(len(survey.arrays), 'array')} in {counted(chunks, 'chunk file')}"
    num_archives = counted(len(survey.archives), "file")
    objects = f"{counted(len(survey.objects), 'object')} and common.pt in {num_archives}"
    return f"checked: {arrays}, {objects}; {bytes_text(survey.nbytes)} in all, {seconds:.1f} s"
