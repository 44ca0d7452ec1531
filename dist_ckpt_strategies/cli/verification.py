"""``dist-ckpt verify``: whether a checkpoint is whole, and what is not."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from dist_ckpt_strategies.cli import format1, format2, parts
from dist_ckpt_strategies.cli.locations import location_of, survey_of
from dist_ckpt_strategies.cli.progress import watched
from dist_ckpt_strategies.storage.format1.survey import check_survey, survey_checkpoint
from dist_ckpt_strategies.storage.format2.survey import (
    Format2Survey,
    check_format2,
    survey_format2,
)
from dist_ckpt_strategies.storage.parts.survey import PartSurvey, check_parts, survey_parts

STATUS_WHOLE = 0
STATUS_DAMAGED = 1


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
        findings = check_parts(survey, watched(progress, "comparing digests"))
    parts.show_verdict(survey, findings, time.monotonic() - began, as_json=as_json)
    return STATUS_DAMAGED if findings else STATUS_WHOLE


def _verify_format1(directory: Path, began: float, *, as_json: bool) -> int:
    with _open_progress() as progress:
        survey = survey_checkpoint(directory, watched(progress, "looking at directories"))
        findings = check_survey(survey, watched(progress, "reading objects"))
    format1.show_verdict(survey, findings, time.monotonic() - began, as_json=as_json)
    return STATUS_DAMAGED if findings else STATUS_WHOLE


def _verify_format2(survey: Format2Survey, began: float, *, as_json: bool) -> int:
    with _open_progress() as progress:
        findings = check_format2(survey, watched(progress, "comparing digests"))
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
