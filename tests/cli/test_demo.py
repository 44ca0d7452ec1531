"""The demonstration, end to end at a small size, and how it fails."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.demo.main import (
    ModelSize,
    ParallelLayout,
    RankTask,
    Training,
    run_demo,
    run_task,
)
from dist_ckpt_strategies.errors import CheckpointExistsError
from tests.support.demo_ranks import run_task_forked

SMALL = Training(
    size=ModelSize(2, 64, num_heads=4, num_query_groups=4, ffn_hidden=128, sequence_length=32),
    global_batch=8,
    num_before_save=3,
    num_after_save=3,
)
INDIVISIBLE = replace(SMALL, size=replace(SMALL.size, num_heads=3, num_query_groups=3))


def run_captured(keep: Path | None, training: Training) -> tuple[int, str]:
    output = io.StringIO()
    console = Console(file=output, width=200)
    status = run_demo(keep, console, training=training, start=run_task_forked)
    return status, output.getvalue()


@pytest.mark.multiprocess
def test_the_demo_shows_that_all_states_are_bit_identical(tmp_path: Path) -> None:
    status, text = run_captured(tmp_path / "kept", SMALL)

    assert status == 0, text
    for layout in ("TP4 x DP1", "TP1 x DP2 x PP2", "TP1 x DP4"):
        # Weights, master weights and two moments, and the loss.
        assert re.search(rf"{layout} +(yes 17/17 +){{4}}0\.0", text)
    assert (tmp_path / "kept" / "metadata.json").exists()
    assert "decoder.layers.mlp.linear_fc2.weight" in dist_ckpt_strategies.open(tmp_path / "kept")


@pytest.mark.multiprocess
def test_a_demo_that_fails_names_the_rank_and_the_reason() -> None:
    status, text = run_captured(None, INDIVISIBLE)

    assert status == 1
    assert "The demonstration failed." in text
    assert "TP2 x DP2: rank " in text
    assert "ValueError: num_attention_heads (3) must be a multiple of" in " ".join(text.split())


@pytest.mark.multiprocess
def test_a_rank_in_a_process_of_its_own_carries_out_its_task(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short = replace(SMALL, num_before_save=1, num_after_save=1)
    outcome = run_task(RankTask(ParallelLayout(), short, tmp_path))

    assert sorted(outcome.losses) == [0, 1]
    assert len(outcome.digests) == 4 * 17
    lines = capfd.readouterr().out.splitlines()
    for line, step in zip(lines, ("train, ite", "save", "train on, ite"), strict=True):
        assert line.startswith(f"TP1 x DP1        {step}")
    assert (tmp_path / "metadata.json").exists()


def test_a_directory_that_holds_files_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()

    with pytest.raises(CheckpointExistsError, match="expected a new or empty directory"):
        run_captured(tmp_path, SMALL)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]
