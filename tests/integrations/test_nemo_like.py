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
from dist_ckpt_strategies.integrations.nemo import strategy_class  # noqa: E402
from tests.integrations import lightning_job, nemo_like  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice


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
    has_state: bool = True,
    callbacks: Any = (),
) -> Any:
    """One rank in this process: what it has at the end, what it saw, where attempts began."""
    scratch.mkdir()
    manager = nemo_like.FailingManager(inner)
    seen: list[Any] = []
    starts: list[Any] = []

    class Start(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            starts.append((trainer.global_step, str(manager.last_failure)))

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
            **lightning_job.QUIET,
        )
        trainer._checkpoint_connector = CheckpointlessCompatibleConnector(trainer)
        trainer.wrapper = call
        trainer.fit(nemo_like.Model(seen), datamodule=nemo_like.Data(60, has_state))
        progress = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return nemo_like.digest(trainer), trainer.global_step, trainer.current_epoch, progress

    wrapper = HPWrapper(checkpoint_manager=manager, finalize=CheckpointlessFinalizeCleanup())
    return wrapper(block)(), set(seen), starts


def test_faults_at_the_beginning_of_steps_change_nothing(tmp_path: Path) -> None:
    outer = [PlannedFault(0, step, FaultPoint.BATCH_START) for step in (1, 3, 6)]
    options: Any = {"callbacks": [nemo_like.Counter]}

    undisturbed, seen, _ = run(tmp_path / "undisturbed", **options)
    found, seen_with_faults, starts = run(tmp_path / "faults", outer=outer, **options)

    assert (found, seen_with_faults) == (undisturbed, seen)
    assert [start for start, _ in starts] == [0, 1, 3, 6]


@pytest.mark.parametrize(
    ("inner", "outer", "has_state", "why"),
    [
        ({(2, "voted")}, [], True, "which only its trainer can complete"),
        ({(2, "updating")}, [], True, "was interrupted in its update of step 2"),
        (set(), [PlannedFault(0, 3, FaultPoint.BATCH_END)], True, "interrupted in its update"),
        (set(), [PlannedFault(0, 3, FaultPoint.BATCH_START)], False, "Data has no state_dict"),
    ],
)
def test_where_no_rank_has_ended_the_step_or_the_data_has_no_state_memory_is_declined(
    inner: Any, outer: Any, has_state: bool, why: str, tmp_path: Path
) -> None:
    undisturbed, seen, _ = run(tmp_path / "undisturbed", has_state=has_state)

    found, seen_with_faults, starts = run(tmp_path / "faults", inner, outer, has_state=has_state)

    assert starts[1][0] == 0
    assert why in starts[1][1]
    assert (found, seen_with_faults) == (undisturbed, seen)
