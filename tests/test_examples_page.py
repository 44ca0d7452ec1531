"""The production script of the page of examples goes on from memory, from disks, from the root."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT, python_blocks
from tests.support.processes import ended

(SCRIPT,) = (b for b in python_blocks(ROOT / "docs" / "examples.md") if "wait_rank()" in b)

HERE = {
    '"/shared/run-7"': '"shared"',
    '"/local/checkpoints"': '"local"',
    "LazyCliqueReplicationStrategy()": "LazyCliqueReplicationStrategy(1, 2)",
    "{loss.item():.6f}": "{loss.item().hex()}",
    "policy=POLICY": "policy=POLICY, options=ManagerOptions(is_async=False)",
    "import SavePolicy": "import ManagerOptions, SavePolicy",
}
"""One node, whose ranks keep each other's copies; saves that are not skipped, so all are there."""

FAULT = """
            loss.backward()
            import os, pathlib
            fault = pathlib.Path(f"fault-{provider.step}-{rank}")
            if fault.exists():
                fault.unlink()
                os.kill(os.getpid(), 9)
"""


def train(root: Path, fault: str = "", **changes: str) -> tuple[int, list[set[str]], str]:
    """Exit code of the launcher, the steps of each rank with their losses, and the output."""
    root.mkdir(exist_ok=True)
    script = SCRIPT.replace("\n            loss.backward()\n", FAULT)
    for old, new in {**HERE, **changes}.items():
        assert old in script, old
        script = script.replace(old, new)
    (root / "train.py").write_text(script)
    if fault:
        (root / f"fault-{fault}").touch()
    launcher = (sys.executable, "-W", "ignore", "-m", "dist_ckpt_strategies.cli", "run")
    variables = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = (*launcher, "--nproc", "2", "train.py")
    done = ended(*command, cwd=root, variables=variables)
    text = done.stdout + done.stderr
    steps = [set(re.findall(rf"^\[{r}\] (step .*)$", done.stdout, re.MULTILINE)) for r in (0, 1)]
    return done.returncode, steps, text


@pytest.mark.multiprocess
@pytest.mark.timeout(400)
def test_the_production_script_goes_on_from_each_tier_with_the_same_losses(tmp_path: Path) -> None:
    code, whole, text = train(tmp_path / "whole")
    assert (code, [len(steps) for steps in whole]) == (0, [12, 12]), text

    # One rank is killed: the other one has the state, and the step runs again.
    code, killed, text = train(tmp_path / "killed", fault="6-1")
    assert (code, killed) == (0, whole), text
    assert "continues after step 6, from memory" in text

    # The job ends after step 9, and later the disks of the nodes are lost too.
    root = tmp_path / "ended"
    code, shorter, text = train(root, **{"NUM_STEPS = 12": "NUM_STEPS = 9"})
    assert (code, [len(steps) for steps in shorter]) == (0, [9, 9]), text
    shutil.copytree(root / "shared", tmp_path / "lost" / "shared")
    for place, step, tier in ((root, 8, "local"), (tmp_path / "lost", 6, "global")):
        code, rest, text = train(place)
        assert code == 0, text
        assert f"continues after step {step}, from {tier}" in text
        assert [len(steps) for steps in rest] == [12 - step] * 2, text
        assert all(found <= expected for found, expected in zip(rest, whole, strict=True)), text
