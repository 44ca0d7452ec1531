"""The pages of the documentation, and the blocks in them."""

import ast
import re
from pathlib import Path
from typing import Any

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


ALLOWED = {"json", "math", "itertools", "pathlib", "struct", "zlib"}
ALLOWED |= {"ml_dtypes", "numpy", "xxhash"}

HELD = "import json\nimport ml_dtypes\nimport numpy as np\n"
"""What the page of format 1 has imported before."""


def reader_of(page: str, function: str) -> dict[str, Any]:
    """What the page's reader defines; it imports nothing of ours, nor of those that write."""
    (code,) = [c for c in python_blocks(ROOT / "docs" / page) if f"def {function}(" in c]
    nodes = list(ast.walk(ast.parse(HELD + code)))
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert imported <= ALLOWED
    found: dict[str, Any] = {}
    exec(compile(HELD + code, page, "exec"), found)  # noqa: S102 - it is what is tested
    return found
