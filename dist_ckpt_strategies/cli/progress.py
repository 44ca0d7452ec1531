"""Bars on stderr while a command reads or writes."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dist_ckpt_strategies.storage.findings import Watch


def open_byte_progress() -> Progress:
    """Bars that count bytes; nothing where stderr is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def watched(progress: Progress, description: str) -> Watch:
    """A new bar, moved by calling what comes back."""
    task = progress.add_task(description, total=None)
    return lambda done, total: progress.update(task, completed=done, total=total)
