"""The map in benchmarks/README.md has every script and every room."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "benchmarks"
MAP = (ROOT / "README.md").read_text().partition("## The map")[2].partition("\n## ")[0]
NAMED = re.findall(r"^\| `([^`]+)` \|", MAP, re.MULTILINE)


def test_the_map_has_every_script_once() -> None:
    scripts = sorted(name for name in NAMED if name.endswith(".py"))

    assert scripts == sorted(path.name for path in ROOT.glob("*.py"))


def test_the_map_has_every_room_once() -> None:
    rooms = sorted(name for name in NAMED if name.endswith("/"))
    found = {f"{path.name}/" for path in ROOT.iterdir() if path.is_dir()}

    assert rooms == sorted(found - {"__pycache__/"})
