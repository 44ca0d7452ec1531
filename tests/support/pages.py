"""The pages of the documentation, and the blocks in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SINGLE = ("README.md", "CHANGELOG.md", "benchmarks/README.md")
PAGES = sorted([*(ROOT / name for name in _SINGLE), *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_WITH_OUTPUT = re.compile(
    r"^```(python|bash)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Language and content of each fenced block."""
    return _FENCE.findall(page.read_text())


def python_blocks(page: Path) -> list[str]:
    return [content for language, content in blocks_of(page) if language == "python"]


def expected_outputs(page: Path) -> list[str | None]:
    """For each python block the text block right behind it, which is what it prints."""
    found = _WITH_OUTPUT.finditer(page.read_text())
    return [match[3] for match in found if match[1] == "python"]


def commands_with_outputs(page: Path) -> list[tuple[str, str]]:
    """Each bash block with the text block right behind it, which is what it prints."""
    found = _WITH_OUTPUT.finditer(page.read_text())
    return [(match[2], match[3]) for match in found if match[1] == "bash" and match[3]]
