"""Bars on stderr while a command reads or writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


@contextmanager
def open_bars(*, in_bytes: bool = False) -> Iterator[Callable[[str], Watch]]:
    """Gives what opens a bar with a description, shown from the first call of what comes back.

    Nothing is shown where stderr is no terminal.
    """
    console = Console(stderr=True)
    counts = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        *(counts if in_bytes else (TimeElapsedColumn(),)),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )

    def open_bar(description: str) -> Watch:
        bar = progress.add_task(description, total=None, visible=False)
        return lambda done, total: progress.update(bar, completed=done, total=total, visible=True)

    with progress:
        yield open_bar
