"""The sources and the pages pass the tools that CONTRIBUTING.md names."""

import shlex
import shutil
from pathlib import Path

import pytest

from tests.support.processes import finished

ROOT = Path(__file__).parents[1]

LIMIT_S = 800
pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 30)]


@pytest.mark.parametrize(
    "command",
    [
        "ruff check .",
        "ruff format --check .",
        "lint-imports --config setup.cfg",
        "mypy",
        "sphinx-build -q -W --keep-going -b html docs site",
    ],
)
def test_a_tool_finds_nothing_to_say(command: str, tmp_path: Path) -> None:
    program, *args = shlex.split(command)
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}: run `tox`")
    args = [str(tmp_path / arg) if arg == "site" else arg for arg in args]
    finished(program, *args, cwd=ROOT, limit_s=LIMIT_S)
