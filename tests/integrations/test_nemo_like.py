"""Recovery of Megatron-Core's state together with Lightning's loops, with real Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pl = pytest.importorskip("lightning.pytorch")

from megatron.core import num_microbatches_calculator, parallel_state  # noqa: E402

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins  # noqa: E402
from dist_ckpt_strategies.inprocess import CheckpointlessFinalizeCleanup, HPCallWrapper, HPWrapper  # noqa: E402
from dist_ckpt_strategies.integrations.lightning import (  # noqa: E402
    CheckpointlessCallback,
    CheckpointlessCompatibleConnector,
    FaultPoint,
    HPFaultInjectionCallback,
    PlannedFault,
)
from dist_ckpt_strategies.integrations.nemo_classes import strategy_class  # noqa: E402
from tests.integrations import nemo_like  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice

EPOCH = 12
"""Samples; of three steps."""


@pytest.fixture(autouse=True)
def megatron() -> Iterator[None]:
    with cpu_stand_ins():
        yield
    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    if dist.is_initialized():
        dist.destroy_process_group()


def run(
    scratch: Path,
    inner: set[tuple[int, str]] = frozenset(),  # type: ignore[assignment]
    outer: list[PlannedFault] = [],  # noqa: B006 - never changed
    *,
    num_samples: int = 60,
    counts: bool = False,
    callbacks: Any = (),
) -> Any:
    """One rank in this process: what it has at the end, what it saw, where attempts began."""
    scratch.mkdir()
    manager = nemo_like.FailingManager(inner)
    seen: list[Any] = []
    starts: list[Any] = []

    class Start(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            batches = trainer.datamodule.batches
            starts.append((trainer.global_step, str(manager.last_failure), batches.num_given))

    def block(call: HPCallWrapper | None = None) -> Any:
        torch.manual_seed(3)
        flags = CheckpointlessCallback(enable_inprocess=True, enable_checkpointless=True)
        fault = HPFaultInjectionCallback(outer, scratch)
        trainer: Any = pl.Trainer(
            accelerator="cpu",
            strategy=strategy_class(nemo_like.Strategy)(device="cpu"),
            callbacks=[*(kind() for kind in callbacks), fault, flags, Start()],
            default_root_dir=scratch,
            max_steps=7,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer._checkpoint_connector = CheckpointlessCompatibleConnector(trainer)
        trainer.wrapper = call
        trainer.fit(nemo_like.Model(seen), datamodule=nemo_like.Data(num_samples, counts))
        progress = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return nemo_like.digest(trainer), trainer.global_step, trainer.current_epoch, progress

    wrapper = HPWrapper(checkpoint_manager=manager, finalize=CheckpointlessFinalizeCleanup())
    return wrapper(block)(), set(seen), starts


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("num_samples", [60, EPOCH])
def test_faults_before_and_after_the_vote_change_nothing(
    num_samples: int, counts: bool, tmp_path: Path
) -> None:
    inner = {(0, "voted"), (2, "updated"), (3, "gathered"), (5, "voted")}
    outer = [PlannedFault(0, step, FaultPoint.BATCH_START) for step in (1, 3, 6)]
    options: Any = {"num_samples": num_samples, "counts": counts}

    undisturbed, seen, _ = run(tmp_path / "undisturbed", **options)
    found, seen_with_faults, starts = run(tmp_path / "faults", inner, outer, **options)

    assert (found, seen_with_faults) == (undisturbed, seen)
    assert [start for start, _, _ in starts] == [0, 1, 1, 3, 3, 4, 6, 6]


def test_data_that_the_state_has_seen_are_passed_over_unread(tmp_path: Path) -> None:
    _, _, starts = run(tmp_path / "faults", outer=[PlannedFault(0, 5, FaultPoint.BATCH_START)])

    assert [(start, num_drawn) for start, _, num_drawn in starts] == [(0, 0), (5, 1)]


def test_a_callback_with_a_state_of_its_own_comes_back(tmp_path: Path) -> None:
    outer = [PlannedFault(0, step, FaultPoint.BATCH_START) for step in (2, 5)]
    options: Any = {"callbacks": [nemo_like.Counter]}

    undisturbed, *_ = run(tmp_path / "undisturbed", **options)

    assert run(tmp_path / "faults", outer=outer, **options)[0] == undisturbed


@pytest.mark.parametrize(
    ("inner", "outer", "callbacks", "why"),
    [
        ({(2, "voted")}, [], [nemo_like.Counter], "cannot tell the state of Counter"),
        ({(2, "gathered")}, [], [nemo_like.Counter], "cannot tell the state of Counter"),
        (set(), [PlannedFault(0, 3, FaultPoint.BATCH_END)], [], "was interrupted when its weights"),
    ],
)
def test_where_no_rank_has_the_objects_of_the_new_step_memory_is_refused(
    inner: Any, outer: Any, callbacks: Any, why: str, tmp_path: Path
) -> None:
    undisturbed, seen, _ = run(tmp_path / "undisturbed", callbacks=callbacks)

    found, seen_with_faults, starts = run(tmp_path / "faults", inner, outer, callbacks=callbacks)

    assert starts[1][0] == 0
    assert f"no rank has the loops, schedules and callbacks of step 3: rank 0 {why}" in starts[1][1]
    assert (found, seen_with_faults) == (undisturbed, seen)
