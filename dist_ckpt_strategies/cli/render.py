"""Output of commands: sizes, tables, one JSON object, progress bars.

The text is made for ten thousand lines and for narrow terminals. The JSON is described in
docs/json.md; a change of meaning raises SCHEMA.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import typer
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
from rich.text import Text

from dist_ckpt_strategies.comm.shared_work import Watch
from dist_ckpt_strategies.config import rank_from_environment

SCHEMA = 3
_UNIT = 1000
_UNITS = ("kB", "MB", "GB", "TB", "PB")
_GAP = "  "
_INDENT = "    "


def printable(text: str) -> str:
    """The text on one line, with everything that could steer a terminal spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def bytes_text(nbytes: int) -> str:
    """Such as ``38.1 MB``: three digits, in powers of ten."""
    if nbytes < _UNIT:
        return f"{nbytes} B"
    amount, power = nbytes / _UNIT, 0
    while round(amount) >= _UNIT and power + 1 < len(_UNITS):
        amount, power = amount / _UNIT, power + 1
    digits = 2 if round(amount, 2) < 10 else 1 if round(amount, 1) < 100 else 0  # noqa: PLR2004
    return f"{amount:.{digits}f} {_UNITS[power]}"


def shape_text(shape: Sequence[int]) -> str:
    """Such as ``4x512``."""
    return "x".join(map(str, shape)) or "scalar"


def counted(count: int, name: str) -> str:
    """Such as ``1 array`` and ``2,000 arrays``."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def print_json(command: str, fields: Mapping[str, Any]) -> None:
    """Print one object: the command, and what it has found."""
    head = {"schema": SCHEMA, "command": command}
    typer.echo(json.dumps(head | dict(fields), indent=2, allow_nan=False))


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Figures for JSON, which has no infinity."""
    return {
        name: str(n) if isinstance(n, float) and not math.isfinite(n) else n
        for name, n in row.items()
    }


def print_dim(console: Console, text: str) -> None:
    """Print a line of less weight."""
    console.print(Text(text, "dim"), soft_wrap=True)


def print_table(
    console: Console,
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[str] = (),
    marked: Collection[int] = (),
) -> None:
    """Print rows in columns, without ever truncating a text.

    Where the terminal is too narrow for the longest row, the first text of each row has a line of
    its own. Without a terminal lines are as long as they need to be, one per row. ``right`` has the
    titles of columns aligned at the right, ``marked`` the numbers of rows shown in red.
    """
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    stacked = console.is_terminal and sum(widths) + len(_GAP) * (len(widths) - 1) > console.width
    lines = []
    for row in (titles, *rows):
        cells = []
        for title, text, width in zip(titles, row, widths, strict=True):
            cells.append(text.rjust(width) if title in right else text.ljust(width))
        name = row[0] + "\n" + _INDENT if stacked else cells[0] + _GAP
        lines.append(name + _GAP.join(cells[1:]).rstrip())
    console.print(Text(lines[0], "bold"), soft_wrap=True)
    # As few texts as possible: rich takes its time for each.
    for is_marked, numbers in groupby(range(len(rows)), lambda row: row in marked):
        text = "\n".join(lines[1 + number] for number in numbers)
        console.print(Text(text, "red" if is_marked else ""), soft_wrap=True)


@contextmanager
def open_bars(*, in_bytes: bool = False) -> Iterator[Callable[[str], Watch]]:
    """Gives what opens a bar with a description, shown from the first call of what comes back.

    Nothing is shown where stderr is no terminal, nor on other ranks of torchrun than the first.
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
        disable=not console.is_terminal or rank_from_environment()[0] > 0,
    )

    def open_bar(description: str) -> Watch:
        bar = progress.add_task(description, total=None, visible=False)
        return lambda done, total: progress.update(bar, completed=done, total=total, visible=True)

    with progress:
        yield open_bar
