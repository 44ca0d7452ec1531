"""What is wrong, and what there is, as commands show it: under a heading, behind a label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from dist_ckpt_strategies.cli.columns import print_wrapped
from dist_ckpt_strategies.cli.text import counted, printable
from dist_ckpt_strategies.storage.findings import Finding

_NUM_FIRST = 3
_MAX_BELOW = 20
_LABEL_WIDTH = 12
_PROBLEM_WIDTH = 19


def print_fact(console: Console, label: str, text: str) -> None:
    """One line of a summary, red where it begins with NO."""
    style = "red" if text.startswith("NO") else ""
    console.print(Text(f"{label:<{_LABEL_WIDTH}}", "bold") + Text(text, style), soft_wrap=True)


def print_first(console: Console, findings: Sequence[Finding]) -> None:
    """The first few findings, as the end of a summary."""
    for finding in findings[:_NUM_FIRST]:
        print_wrapped(console, printable(str(finding)), " " * _LABEL_WIDTH, " " * _LABEL_WIDTH)


def print_below(
    console: Console, title: str, findings: Sequence[Finding], text_of: Callable[[Finding], str]
) -> None:
    """Findings about one thing, under a heading; of very many the first ones.

    Args:
        console: where to.
        title: what they are about.
        findings: all of them.
        text_of: what is said of each, behind its kind.
    """
    console.print(Text(printable(title), "bold"), soft_wrap=True)
    for finding in findings[:_MAX_BELOW]:
        label = finding.problem.value.replace("_", " ")
        first, others = f"  {label:<{_PROBLEM_WIDTH}}", " " * (2 + _PROBLEM_WIDTH)
        print_wrapped(console, printable(text_of(finding)), first, others)
    if len(findings) > _MAX_BELOW:
        more = f"  ... and {len(findings) - _MAX_BELOW:,} more; --json lists them"
        console.print(Text(more, "dim"), soft_wrap=True)


def print_by_key(
    console: Console, findings: Sequence[Finding], text_of: Callable[[Finding], str]
) -> None:
    """All findings, sorted by key, under a heading for each; see print_below."""
    for key, some in groupby(findings, lambda finding: finding.key):
        print_below(console, key or "the checkpoint", list(some), text_of)


def not_complete(findings: Sequence[Finding]) -> str:
    """What a summary says of a checkpoint with findings."""
    return f"NO, {counted(len(findings), 'finding')}; `dist-ckpt verify` lists them all"


def not_whole(findings: Sequence[Finding]) -> str | None:
    """What a verdict says of a checkpoint with findings; None without one."""
    if not findings:
        return None
    num_files = len({finding.path for finding in findings})
    return f"is NOT whole: {counted(len(findings), 'finding')} in {counted(num_files, 'file')}"


def print_verdict(console: Console, root: str, wrong: str | None, checked: str) -> None:
    """Whether a checkpoint is whole, in a line of its own, and what was looked at.

    Args:
        console: where to.
        root: the checkpoint.
        wrong: what it is instead of whole; None where it is.
        checked: what was looked at; nothing where it is empty.
    """
    verdict, style = (" is whole", "bold green") if wrong is None else (f" {wrong}", "bold red")
    console.print(Text(printable(root)) + Text(verdict, style), soft_wrap=True)
    if checked:
        console.print(Text(checked, "dim"), soft_wrap=True)
