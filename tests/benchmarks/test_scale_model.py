from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.scale_model import Shape, cases

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "scale_model.py"


def test_every_case_is_planned_evenly_and_described(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
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
    assert len(costs) == len(list(cases(smoke=True)))
    for cost in costs:
        assert cost["seconds"] > 0
        assert cost["unevenness"] <= 1.1
        assert cost["gathered_nbytes"] > 1000
    shared = [c["gathered_nbytes"] for c in costs if c["case"]["shape"] == Shape.SHARED]
    assert len(set(shared[1:])) == 1  # the same for 4 ranks and for 16: equal bytes are sent once
