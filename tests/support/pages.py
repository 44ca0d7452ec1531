"""The pages of the documentation, and the blocks in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SINGLE = ("README.md", "CHANGELOG.md", "benchmarks/README.md")
PAGES = sorted([*(ROOT / name for name in _SINGLE), *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page_id(page: Path) -> str:
    """Its name, for the name of a test."""
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Language and content of each fenced block."""
    return _FENCE.findall(page.read_text())


def python_blocks(page: Path) -> list[str]:
    return [content for language, content in blocks_of(page) if language == "python"]


def expected_outputs(page: Path) -> list[str | None]:
    """For each python block the text block right behind it, which is what it prints."""
    found: list[str | None] = []
    text = page.read_text()
    for match in _FENCE.finditer(text):
        if match[1] != "python":
            continue
        follower = re.match(
            r"\n\n```text\n(.*?)^```$", text[match.end() :], re.MULTILINE | re.DOTALL
        )
        found.append(follower[1] if follower else None)
    return found
