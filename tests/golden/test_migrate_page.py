"""The commands on the page of old checkpoints print what the page says."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dist_ckpt_strategies.cli.app import app
from tests.golden.sets import GoldenSet
from tests.support.pages import ROOT, blocks_of

PAGE = ROOT / "docs" / "migrate.md"
MEASURED = re.compile(r"\d[\d.]* (?:s\b|MB/s)")


def shown() -> list[tuple[list[str], str]]:
    """Commands over OLD and NEW, with what stands behind them."""
    return [
        (commands.splitlines(), output)
        for (language, commands), (kind, output) in pairwise(blocks_of(PAGE))
        if (language, kind) == ("bash", "text") and " OLD" in commands
    ]


def unmeasured(text: str) -> list[str]:
    return [MEASURED.sub("…", line) for line in text.splitlines()]


def test_the_commands_print_what_the_page_says(
    flat: GoldenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("OLD").symlink_to(flat.checkpoint)
    steps = shown()

    assert [len(commands) for commands, _ in steps] == [1, 3]
    for commands, expected in steps:
        printed = ""
        for command in commands:
            result = CliRunner().invoke(app, shlex.split(command)[1:])
            assert result.exit_code == 0, result.output
            printed += result.stdout.replace(f"{tmp_path}/", "")
        assert unmeasured(printed) == unmeasured(expected)
