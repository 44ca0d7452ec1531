"""The scripts on the page of recovery train to the end, whatever happens to their ranks."""

import os
import re
import runpy
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.recovery.megatron_provider import MegatronStateProvider
from tests.support.pages import ROOT, python_blocks
from tests.support.processes import finished
from tests.support.restarts import Wrappers, run_restartable

PAGE = ROOT / "docs" / "recovery.md"
PLAIN, MEGATRON = (block for block in python_blocks(PAGE) if "wait_rank()" in block)
PLAIN_SIZE = 3
"""Sums of two do not depend on their order."""

LAUNCHER = (sys.executable, "-m", "dist_ckpt_strategies.cli", "run")

ON_CPUS = {
    'BACKEND = "nccl"': 'BACKEND = "interruptible_gloo"',
    "gradient_accumulation_fusion=False,": (
        "gradient_accumulation_fusion=False, bias_activation_fusion=False,"
        "masked_softmax_fusion=False, use_cpu_initialization=True,"
    ),
}
"""What a GPU has and a CPU has not."""

FAULTS = {
    "\nNUM_STEPS": "\nimport os\nfrom pathlib import Path\n\nNUM_STEPS",
    "            loss.backward()": """
            if state.step == 2 and rank == 0 and not Path("raised").exists():
                Path("raised").touch()
                raise ValueError("on purpose")
            loss.backward()""",
    "            with manager.updating():": """
            if state.step == 5 and rank == 1 and not Path("killed").exists():
                Path("killed").touch()
                os.kill(os.getpid(), 9)
            with manager.updating():""",
}
"""One exception and one death."""

EXACT = {
    "{loss.item():.6f}": "{loss.item().hex()}",
    "Strategy(1, 2)": f"Strategy(1, {PLAIN_SIZE})",
    "import SavePolicy": "import ManagerOptions, SavePolicy",
    "policy=POLICY)": "policy=POLICY, options=ManagerOptions(is_async=False))",
}
"""All bits of a loss; one clique; and no local save is skipped because another one still runs."""


def changed(script: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


def run_page(
    rank: int, _wrappers: Wrappers, script: str, size: int, interrupted: bool
) -> list[str]:
    """Body of a rank: the steps that the script prints, started as torchrun starts it."""
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(size),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    os.chdir(Path(script).parent)
    warnings.simplefilter("ignore")
    if interrupted and rank == 1:
        tear_once(4)
    printed = StringIO()
    on_cpu = mock.patch("torch.cuda.set_device")
    with cpu_stand_ins(), on_cpu, redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    wanted = ("step ", "continues ")
    return [line for line in printed.getvalue().splitlines() if line.startswith(wanted)]


def tear_once(step: int) -> None:
    """From now on the update of a step fails half-way, the first time."""
    update: Callable[[Any], None] = MegatronStateProvider.apply_update
    left = [ValueError("on purpose")]

    def interrupted(self: Any) -> None:
        update(self)
        if self.step == step and left:
            raise left.pop()

    setattr(MegatronStateProvider, "apply_update", interrupted)  # noqa: B010 - in this fork alone


def printed_by(
    size: int, directory: Path, script: str, *, interrupted: bool = False
) -> list[list[str]]:
    """The steps that the script prints on each rank, and from where it goes on."""
    directory.mkdir(exist_ok=True)
    path = directory / "train.py"
    path.write_text(script)
    return run_restartable(size, run_page, str(path), size, interrupted, timeout_s=300)


@pytest.mark.multiprocess
def test_the_plain_script_continues_after_an_exception_and_a_death_and_from_each_tier(
    tmp_path: Path,
) -> None:
    plain = changed(PLAIN, EXACT)
    expected = printed_by(PLAIN_SIZE, tmp_path / "reference", plain)
    printed_by(PLAIN_SIZE, tmp_path / "disk", changed(plain, {"NUM_STEPS = 12": "NUM_STEPS = 9"}))
    shutil.copytree(tmp_path / "disk" / "shared", tmp_path / "lost" / "shared")
    for place, step, tier in (("disk", 8, "local"), ("lost", 6, "global")):
        later = printed_by(PLAIN_SIZE, tmp_path / place, plain)
        begin = f"continues after step {step}, from {tier}"
        assert later == [[begin, *steps[step:]] for steps in expected]
    script = tmp_path / "train.py"
    script.write_text(changed(plain, FAULTS))
    variables = {"RES_OPTIONS": "attempts:0", "GLOO_SOCKET_IFNAME": "lo"}

    launched = (*LAUNCHER, "--nproc", str(PLAIN_SIZE), script)
    done = finished(*launched, cwd=tmp_path, variables=variables)

    for rank in range(PLAIN_SIZE):
        own = re.findall(rf"^\[{rank}\] (step .*)$", done.stdout, re.MULTILINE)
        assert set(own) <= set(expected[rank])
        assert own[-1] == expected[rank][-1]
    assert expected[0][-1].startswith("step 12: ")
    assert "ValueError: on purpose" in done.stderr
    gone = re.findall(r"rank \d is gone: .*?;", done.stderr)
    assert gone == ["rank 1 is gone: killed by SIGKILL;"]
    assert done.stderr.count("recovered from memory: step ") == 2 * PLAIN_SIZE
    assert "recovered from memory: step 6, role receive" in done.stderr


@pytest.mark.multiprocess
def test_the_script_for_megatron_continues_after_an_interrupted_update_and_from_the_disk(
    tmp_path: Path,
) -> None:
    script = changed(MEGATRON, ON_CPUS)

    expected = printed_by(4, tmp_path / "reference", script)
    interrupted = printed_by(4, tmp_path / "interrupted", script, interrupted=True)
    later = printed_by(4, tmp_path / "interrupted", script)

    assert all(len(steps) == 6 for steps in expected)
    for rank in range(4):
        # A rank of the other instance may have ended the step and said so, before it heard.
        assert interrupted[rank] in (expected[rank], expected[rank][:4] + expected[rank][5:])
        assert later[rank][0].startswith("step 4: ")
