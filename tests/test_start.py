"""What is not loaded before somebody needs it: the package and its command start at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.multiprocess

HEAVY = {"torch", "megatron", "tensorstore", "zarr", "numpy", "ml_dtypes", "xxhash"}
PRINTING = {"typer", "rich"}


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a new process has, once it has run the code."""
    script = f"""
import sys
{code}
print(*sorted({{name.partition(".")[0] for name in sys.modules}}), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "code",
    [
        "import dist_ckpt_strategies",
        "import dist_ckpt_strategies; dir(dist_ckpt_strategies)",
        "from dist_ckpt_strategies import Options; Options()",
        "import dist_ckpt_strategies.errors",
    ],
)
def test_importing_the_package_loads_no_library(code: str) -> None:
    loaded = loaded_by(code)

    assert "dist_ckpt_strategies" in loaded
    assert loaded & (HEAVY | PRINTING) == set()


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["inspect", "--help"], ["run", "-h"]])
def test_help_and_versions_load_nothing_but_what_prints(args: list[str]) -> None:
    loaded = loaded_by(
        "from typer.testing import CliRunner\n"
        "from dist_ckpt_strategies.cli.app import app\n"
        f"assert CliRunner().invoke(app, {args}).exit_code == 0"
    )

    assert "typer" in loaded
    assert loaded & HEAVY == set()
