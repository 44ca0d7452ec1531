"""The commands: in this process, or in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from dist_ckpt_strategies.cli.app import app

PROGRAM = (sys.executable, "-m", "dist_ckpt_strategies.cli")


def run(*args: Any, answer: str = "") -> Result:
    """One command in this process."""
    return CliRunner().invoke(app, [*map(str, args)], input=answer)


def json_of(*args: Any, code: int | None = None) -> dict[str, Any]:
    """What a command prints with ``--json``, and nothing else; its exit status, if given."""
    result = run(*args, "--json")
    assert code in {None, result.exit_code}, result.exit_code
    assert result.stdout
    assert result.stderr == ""
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def issues_of(address: str | Path) -> list[tuple[str, str | None, str]]:
    """What ``verify`` finds: problem, key and path of each issue."""
    issues = json_of("verify", address)["issues"]
    return [(one["problem"], one["key"], one["path"]) for one in issues]


def begun(*command: str | Path, **variables: str) -> subprocess.Popen[str]:
    """A process with these variables in its environment, and a pipe to each of its streams."""
    return subprocess.Popen(
        [*map(str, command)],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
