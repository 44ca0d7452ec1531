"""What is not loaded before somebody needs it: the package and its command start at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.multiprocess

HEAVY = {"torch", "megatron", "tensorstore", "zarr", "numpy", "ml_dtypes", "xxhash"}
PRINTING = {"typer", "rich"}

IMPORTS = """
import dist_ckpt_strategies
import dist_ckpt_strategies.errors
dir(dist_ckpt_strategies)
dist_ckpt_strategies.Options()
"""
HELP = """
from typer.testing import CliRunner
from dist_ckpt_strategies.cli.app import app
for args in (["--help"], ["--version"], ["inspect", "--help"], ["run", "-h"]):
    assert CliRunner().invoke(app, args).exit_code == 0
"""


@pytest.mark.parametrize(("code", "lacking"), [(IMPORTS, HEAVY | PRINTING), (HELP, HEAVY)])
def test_libraries_are_loaded_when_they_are_needed(code: str, lacking: set[str]) -> None:
    listing = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{listing}"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "dist_ckpt_strategies" in loaded
    assert loaded & lacking == set()
