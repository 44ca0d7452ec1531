"""Bars on stderr while a command reads or writes."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dist_ckpt_strategies.formats.issues import Watch


def open_progress(*, in_bytes: bool = False) -> Progress:
    """Bars, of what is counted in bytes if so said; nothing where stderr is no terminal."""
    console = Console(stderr=True)
    counts = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        *(counts if in_bytes else (TimeElapsedColumn(),)),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def watched(progress: Progress, description: str) -> Watch:
    """A new bar, shown from the first call of what comes back."""
    task = progress.add_task(description, total=None, visible=False)
    return lambda done, total: progress.update(task, completed=done, total=total, visible=True)
