"""The messages that the runbook quotes are those of the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from megatron.core.dist_checkpointing import mapping, validation
from megatron.core.dist_checkpointing.strategies import base

import dist_ckpt_strategies

DOCS = Path(__file__).parents[1] / "docs"
PACKAGE = Path(dist_ckpt_strategies.__file__).parent
MEGATRONS = [Path(str(module.__file__)) for module in (mapping, validation, base)]
LEAST = 12
"""Characters of a text that say something, placeholders left out."""


def texts_of(path: Path) -> set[str]:
    """Every text of a source file, with ``…`` for what is filled in."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
            found.add("".join(map(str, parts)))
    return found


@cache
def all_texts() -> tuple[str, ...]:
    sources = [*PACKAGE.rglob("*.py"), *MEGATRONS]
    return tuple(text for path in sources for text in texts_of(path) if len(text) >= LEAST)


def quoted_texts() -> list[str]:
    """What the first or second column of a table quotes, and stands alone there."""
    page = (DOCS / "operations.md").read_text()
    cells = [cell.strip() for line in page.splitlines() for cell in line.split("|")[1:3]]
    spans = [cell[1:-1] for cell in cells if re.fullmatch(r"`[^`]+`", cell)]
    return [
        s
        for s in dict.fromkeys(spans)
        if " " in s and not s.startswith(("dist-ckpt", "--", "py-spy", "complete ", "rank "))
    ]


def is_raised(text: str) -> bool:
    return any(text in known for known in all_texts())


@pytest.mark.parametrize("text", quoted_texts())
def test_a_quoted_text_is_one_of_the_code(text: str) -> None:
    assert is_raised(text)


def test_texts_that_stand_elsewhere_are_those_of_the_code_too() -> None:
    page = (DOCS / "operations.md").read_text()
    elsewhere = {
        span
        for line in page.splitlines()
        for span in re.findall(r"`([^`]+)`", line)
        if "…" in span and " " in span and not span.startswith(("rank ", "complete "))
    }

    assert elsewhere
    assert {span for span in elsewhere if not is_raised(span)} == set()
