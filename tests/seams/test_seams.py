"""A sample of the seams, with each value of each axis; ``python -m tests.seams`` has all."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.seams.matrix import FAULTS, LAUNCHERS, LOOPS, SAVES, drawn, run_cell

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(900)]

SAMPLE = {
    "plain": ("torchrun", "manager", "exception"),
    "Lightning": ("run", "local", "kill"),
    "Megatron-LM": ("run", "manager", "SIGTERM"),
    "DCP": ("torchrun", "none", "stop"),
}
NEEDS = {"Lightning": "lightning", "Megatron-LM": "einops"}


def test_the_sample_has_each_value_of_each_axis() -> None:
    cells = [(*axes, loop) for loop, axes in SAMPLE.items()]
    found = [set(values) for values in zip(*cells, strict=True)]
    assert found == [set(LAUNCHERS), set(SAVES), set(FAULTS), set(LOOPS)]


@pytest.mark.parametrize("loop", SAMPLE)
def test_a_training_goes_on_bit_for_bit_or_ends_and_says_why(loop: str, tmp_path: Path) -> None:
    needed = NEEDS.get(loop, "torch")
    if find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    launcher, saves, fault = SAMPLE[loop]
    run_cell(drawn(launcher, saves, loop, fault, seed=1), tmp_path / "cell")
