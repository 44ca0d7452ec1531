"""Lists in columns, made for ten thousand lines and for narrow terminals."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_GAP = "  "
_INDENT = "    "


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of a list.

    Attributes:
        name: what it is about.
        facts: one text for each column after the first.
        is_marked: whether it is to catch the eye.
    """

    name: str
    facts: tuple[str, ...]
    is_marked: bool = False


def print_list(
    console: Console, titles: Row, rows: Sequence[Row], right: Collection[str] = ()
) -> None:
    """Print rows in columns, without ever cutting a text.

    Where the terminal is too narrow for the longest name and its facts, each name has a line of
    its own. Without a terminal lines are as long as they need to be, one per row.

    Args:
        console: where to.
        titles: of the columns.
        rows: the entries, in order.
        right: titles of the columns that are aligned at the right.
    """
    columns = list(zip(titles.facts, *(row.facts for row in rows), strict=True))
    widths = [max(map(_width, column)) for column in columns]
    on_right = [title in right for title in titles.facts]
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


def print_section(
    console: Console, titles: Row, rows: Sequence[Row], right: Collection[str]
) -> None:
    """Print rows, if there are any, and an empty line behind them; see print_list."""
    if rows:
        print_list(console, titles, rows, right)
        console.print()


def print_wrapped(console: Console, text: str, first: str, others: str) -> None:
    """Print a text, broken between words where the terminal ends.

    Args:
        console: where to; without a terminal the text stays on one line.
        text: what to print.
        first: before the first line.
        others: before the others.
    """
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
