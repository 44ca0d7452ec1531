"""What campaigns of random faults have in common: their cases, and what must never happen."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import format_exception
from typing import TypeVar

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.measuring.command_line import Output
from benchmarks.measuring.disks import workspace

SMOKE_SHARE = 20
"""A campaign of toy size has one case for so many."""

KILL = "kill"
METHODS = {"save": "a save", "save_behind": "an asynchronous save"}
"""Saves in which ranks are killed: methods of a rank's worker, and words for tables."""

_Case = TypeVar("_Case")


class ViolationError(Exception):
    """Something that must never happen did."""

    def __init__(self, fault: str, why: str, case: object) -> None:
        super().__init__(f"{fault}: {why}\n{case!r}")
        self.fields = {"fault": fault, "why": why, "case": repr(case)}


@contextmanager
def violations(fault: str, case: object) -> Iterator[None]:
    """Anything raised that is no error of ours, and a rank that dies or hangs, is a violation."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ViolationError):
            raise
        raise ViolationError(fault, "".join(format_exception(error)), case) from error


@contextmanager
def reported_violations(seed: int, output: Output) -> Iterator[None]:
    """End with status 1, and say case and seed, if the block finds a violation."""
    try:
        yield
    except ViolationError as violation:
        output.lines.write("violation", violation.fields, seed=seed)
        typer.echo(f"VIOLATION with --seed {seed}: {violation}", err=True)
        raise typer.Exit(1) from violation


def build_class_table(
    title: str, names: Sequence[str], counts: Sequence[str], rows: Iterable[Sequence[str]]
) -> Table:
    """A table of classes of cases, each fault in a section of its own.

    Args:
        title: above it.
        names: titles of the columns that say which class; the first is the fault.
        counts: titles of the columns that say how many.
        rows: sorted by fault.
    """
    table = Table(title=title)
    for name in names:
        table.add_column(name)
    for name in counts:
        table.add_column(name, justify="right")
    last = None
    for row in rows:
        if last not in {None, row[0]}:
            table.add_section()
        last = row[0]
        table.add_row(*row)
    return table


def chance_of(fault: str, seed: int) -> random.Random:
    """Random numbers for one kind of fault."""
    return random.Random(f"{fault} {seed}")  # noqa: S311 - to be repeated


def run_parts(
    parts: Sequence[Callable[[Path], Iterator[_Case]]], total: int, directory: Path | None
) -> Iterator[_Case]:
    """The cases of all parts, each part in a directory of its own; shows how many are done.

    Args:
        parts: run the cases of a part, and yield what each has come to.
        total: cases of all parts.
        directory: where to work; None for the temporary one.
    """
    with (
        workspace(directory) as place,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        task = progress.add_task("cases", total=total)
        for number, part in enumerate(parts):
            root = place / str(number)
            root.mkdir()
            for case in part(root):
                yield case
                progress.advance(task)
