from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "planning.py"


@pytest.mark.multiprocess
def test_every_plan_is_made_for_all_shards_of_the_job(tmp_path: Path) -> None:
    out = tmp_path / "planning.jsonl"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--smoke", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run, *costs = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]

    assert run["kind"] == "run"
    # 16 ranks at TP 8: 60 weights on each, and 20 optimizer buffers, each on two ranks.
    # Rank 0 holds two of the buffers (64 and 72).
    assert {cost["planner"]: cost["num_shards"] for cost in costs} == {
        "save, format 1": 16 * 60 + 20 * 2,
        "save, format 2": 16 * 60 + 20 * 2,
        "load": 60 + 2,
        "two-stage load": 2 * (60 + 2),
    }
    assert all(cost["cpu_seconds"] > 0 for cost in costs)
