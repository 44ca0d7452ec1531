"""The other environment: where it is, and how a job is run there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop.cases import Case

_SCRIPT = Path(__file__).with_name("peer.py")
_TIMEOUT_S = 120.0

RunOld = Callable[[Case, dict[str, Any]], list[str]]


@pytest.fixture(scope="session")
def old_python() -> str:
    """The Python of the environment with Megatron-Core 0.15.3."""
    found = os.environ.get("DIST_CKPT_INTEROP_PYTHON")
    if not found:
        pytest.skip("needs Megatron-Core 0.15.3: run `tox -e interop`")
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The directory that both sides use."""
    found = tmp_path / "checkpoint"
    found.mkdir()
    return found


@pytest.fixture
def run_old(old_python: str, checkpoint: Path) -> RunOld:
    """Carries out a job in the other environment; what its ranks found wrong."""

    def run(case: Case, job: dict[str, Any]) -> list[str]:
        folder = checkpoint.parent
        (folder / "job.json").write_text(json.dumps(job))
        for name in ("tensors", "objects", "common"):
            torch.save(getattr(case, name), folder / f"{name}.pt")
        found = subprocess.run(
            [old_python, "-P", str(_SCRIPT), str(folder)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        )
        notes = [folder / f"rank{rank}.json" for rank in range(job["size"])]
        missing = [note.name for note in notes if not note.exists()]
        if found.returncode or missing:
            pytest.fail(f"exit status {found.returncode}, no {missing}:\n{found.stderr[-4000:]}")
        findings = [finding for note in notes for finding in json.loads(note.read_text())]
        for note in notes:
            note.unlink()
        return findings

    return run
