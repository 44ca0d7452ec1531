"""What commands print: one summary of a checkpoint, as text for people or as one JSON object.

The text is made for ten thousand lines and for narrow terminals. The JSON is described in
docs/cli.md; a change of meaning raises SCHEMA.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, TypeVar

import typer
from rich.cells import cell_len
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

from dist_ckpt_strategies.config import rank_from_environment
from dist_ckpt_strategies.errors import ArrayNotFoundError
from dist_ckpt_strategies.formats.issues import Issue, Watch

SCHEMA = 1
_T = TypeVar("_T")
_UNIT = 1000
_UNITS = ("kB", "MB", "GB", "TB", "PB")
_GAP = "  "
_INDENT = "    "
_LABEL_WIDTH = 12
_PROBLEM_WIDTH = 19
_MAX_PER_SECTION = 20


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


def matching(items: Sequence[_T], key_of: Callable[[_T], str], pattern: str | None) -> list[_T]:
    """The items whose key matches a glob, if there is one; ``*`` stands for any characters."""
    return [one for one in items if pattern is None or fnmatchcase(key_of(one), pattern)]


def require_match(root: object, what: str, count: int, pattern: str | None, found: object) -> None:
    """Refuse a pattern that selects nothing.

    Args:
        root: the checkpoint.
        what: the pattern is for: ``keys``, say.
        count: how many of these there are.
        pattern: a glob, or None.
        found: what matches; falsy for nothing.

    Raises:
        ArrayNotFoundError: nothing matches.
    """
    if pattern is not None and not found:
        raise ArrayNotFoundError(f"{root}: none of its {count} {what} matches {pattern!r}")


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of a table.

    Attributes:
        name: the first column.
        facts: one text for each further column.
        is_marked: whether it is shown in red.
    """

    name: str
    facts: tuple[str, ...]
    is_marked: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below their titles.

    Attributes:
        titles: of the columns.
        rows: in the order in which they are shown; without any the table is left out.
        right: titles of the columns that are aligned at the right.
    """

    titles: Row
    rows: tuple[Row, ...]
    right: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """Issues of one array, object or file.

    Attributes:
        title: what they are about.
        lines: of each issue its kind, and expected and found.
    """

    title: str
    lines: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """What ``inspect`` or ``verify`` has found.

    Attributes:
        root: the checkpoint.
        fields: of the JSON object, without the issues.
        issues: everything that is wrong.
        tables: lists of what there is.
        facts: labels and texts.
        num_first: issues that are shown below the facts.
        sections: all issues, where each of them is shown.
        verdict: the last line but one, after the root.
        checked: the last line: what was looked at.
    """

    root: str
    fields: Mapping[str, Any]
    issues: tuple[Issue, ...]
    tables: tuple[Table, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    num_first: int = 0
    sections: tuple[Section, ...] = ()
    verdict: str = ""
    checked: str = ""


def sections_of(
    issues: Iterable[Issue],
    title_of: Callable[[Issue], str],
    text_of: Callable[[Issue], str] = str,
) -> tuple[Section, ...]:
    """Issues that follow each other and have one title, as a section."""
    return tuple(
        Section(title, tuple((one.problem.value.replace("_", " "), text_of(one)) for one in some))
        for title, some in groupby(issues, title_of)
    )


def print_summary(command: str, summary: Summary, *, as_json: bool) -> None:
    """Print what a command has found.

    Args:
        command: its name.
        summary: the result.
        as_json: print one JSON object.
    """
    if as_json:
        fields = {**summary.fields, "findings": [asdict(issue) for issue in summary.issues]}
        print_json(command, {"path": summary.root} | fields)
        return
    console = Console(highlight=False)
    for table in filter(lambda table: table.rows, summary.tables):
        print_table(console, table)
        console.print()
    for section in summary.sections:
        _print_section(console, section)
    for label, text in summary.facts:
        style = "red" if text.startswith("NO") else ""
        console.print(Text(f"{label:<{_LABEL_WIDTH}}", "bold") + Text(text, style), soft_wrap=True)
    for issue in summary.issues[: summary.num_first]:
        _print_wrapped(console, printable(str(issue)), " " * _LABEL_WIDTH, " " * _LABEL_WIDTH)
    if summary.verdict:
        style = "bold red" if summary.issues else "bold green"
        verdict = Text(f" {summary.verdict}", style)
        console.print(Text(printable(summary.root)) + verdict, soft_wrap=True)
    if summary.checked:
        print_dim(console, summary.checked)


def print_json(command: str, fields: Mapping[str, Any]) -> None:
    """Print one object: the command, and what it has found."""
    head = {"schema": SCHEMA, "command": command}
    typer.echo(json.dumps(head | dict(fields), indent=2, allow_nan=False))


def print_dim(console: Console, text: str) -> None:
    """Print a line of less weight."""
    console.print(Text(text, "dim"), soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """Print rows in columns, without ever cutting a text.

    Where the terminal is too narrow for the longest name and its facts, each name has a line of
    its own. Without a terminal lines are as long as they need to be, one per row.
    """
    titles, rows = table.titles, table.rows
    columns = list(zip(titles.facts, *(row.facts for row in rows), strict=True))
    widths = [max(map(_width, column)) for column in columns]
    on_right = [title in table.right for title in titles.facts]
    name_width = max(_width(row.name) for row in (titles, *rows))
    width = name_width + sum(len(_GAP) + width for width in widths)
    stacked = console.is_terminal and width > console.width
    lines = []
    for row in (titles, *rows):
        facts = _GAP.join(map(_padded, row.facts, widths, on_right)).rstrip()
        name = row.name + ("\n" + _INDENT if stacked else _blank(row.name, name_width) + _GAP)
        lines.append(name + facts)
    console.print(Text(lines[0], "bold"), soft_wrap=True)
    # As few texts as possible: rich takes its time for each.
    for is_marked, of_kind in groupby(zip(rows, lines[1:], strict=True), lambda x: x[0].is_marked):
        text = Text("\n".join(line for _, line in of_kind), "red" if is_marked else "")
        console.print(text, soft_wrap=True)


def _print_section(console: Console, section: Section) -> None:
    console.print(Text(printable(section.title), "bold"), soft_wrap=True)
    for label, text in section.lines[:_MAX_PER_SECTION]:
        first, others = f"  {label:<{_PROBLEM_WIDTH}}", " " * (2 + _PROBLEM_WIDTH)
        _print_wrapped(console, printable(text), first, others)
    if len(section.lines) > _MAX_PER_SECTION:
        num_more = len(section.lines) - _MAX_PER_SECTION
        print_dim(console, f"  ... and {num_more:,} more; --json lists them")


def _print_wrapped(console: Console, text: str, first: str, others: str) -> None:
    """Print a text after ``first``; further lines, on a narrow terminal, after ``others``."""
    width = console.width if console.is_terminal else len(first) + len(text)
    lines = textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _padded(text: str, width: int, on_right: bool) -> str:  # noqa: FBT001 - one of three lists
    return _blank(text, width) + text if on_right else text + _blank(text, width)


def _blank(text: str, width: int) -> str:
    return " " * (width - _width(text))


def _width(text: str) -> int:
    """Columns on a terminal; what is printable and ASCII takes one each."""
    return len(text) if text.isascii() else cell_len(text)


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
