"""A training with real Lightning: faults of its ranks, and the same result to the bit."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pl = pytest.importorskip("lightning.pytorch")
boring = pytest.importorskip("lightning.pytorch.demos.boring_classes")

from dist_ckpt_strategies import SavePolicy, TieredCheckpointManager  # noqa: E402
from dist_ckpt_strategies.errors import StrategyError  # noqa: E402
from dist_ckpt_strategies.inprocess import CheckpointlessFinalizeCleanup, HPCallWrapper, HPWrapper  # noqa: E402
from dist_ckpt_strategies.integrations.lightning import (  # noqa: E402
    CheckpointlessCallback,
    CheckpointlessCompatibleConnector,
    FaultPoint,
    HPFaultInjectionCallback,
    PlannedFault,
    TieredCheckpointCallback,
)
from dist_ckpt_strategies.recovery import CheckpointManager, PEFTCheckpointManager, Tier  # noqa: E402
from tests.integrations import lightning_job  # noqa: E402
from tests.support.processes import finished  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice

ROOT = Path(__file__).parents[2]
FAULTS = [
    {"rank": 1, "step": 2, "point": "forward", "kind": "exception"},
    {"rank": 0, "step": 5, "point": "batch start", "kind": "exception"},
    {"rank": 2, "step": 6, "point": "after the backward pass", "kind": "SIGKILL"},
    {"rank": 3, "step": 8, "point": "before the optimizer's step", "kind": "exception"},
    {"rank": 1, "step": 10, "point": "batch end", "kind": "exception"},
]
"""Step 5 is the first of an epoch, step 10 begins when the last batch of one has ended."""


def run_job(scratch: Path, faults: list[Any], **trainer: Any) -> dict[str, Any]:
    """Four ranks under ``dist-ckpt run``: what they wrote down."""
    scratch.mkdir()
    task = scratch / "task.json"
    fields = {"max_epochs": -1, **trainer}
    task.write_text(json.dumps({"faults": faults, "progress_timeout_s": 60, "trainer": fields}))
    variables = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    launcher = [sys.executable, "-P", "-m", "dist_ckpt_strategies.cli", "run", "--nproc", "4"]
    script = Path(__file__).with_name("lightning_job.py")
    finished(*launcher, script, task, limit_s=270, variables=variables)
    lines = [
        json.loads(line)
        for path in sorted(scratch.glob("lines*"))
        for line in path.read_text().splitlines()
    ]
    return {
        "losses": {tuple(line) for line in lines if line[0] == "loss"},
        "starts": sorted({tuple(line[1:]) for line in lines if line[0] == "start"}, key=str),
        "finals": [json.loads((scratch / f"final{r}.json").read_text()) for r in range(4)],
    }


@pytest.mark.multiprocess
def test_exceptions_and_a_killed_rank_leave_the_result_as_it_is_without_them(
    tmp_path: Path,
) -> None:
    undisturbed = run_job(tmp_path / "undisturbed", [], max_steps=13)
    found = run_job(tmp_path / "faults", FAULTS, max_steps=13)

    assert len(undisturbed["losses"]) == 4 * 13
    assert found["losses"] == undisturbed["losses"]
    assert found["finals"] == undisturbed["finals"]
    memory = {(rank, step, step) for rank in range(4) for step in (2, 5, 6, 8, 10)}
    assert set(found["starts"]) == memory | {(rank, 0, None) for rank in range(4)}


LOOPS: list[dict[str, Any]] = [
    {"max_epochs": 3},
    {"max_epochs": 3, "accumulate_grad_batches": 2},
    {"max_epochs": 3, "val_check_interval": 2},
    {"max_epochs": -1, "max_steps": 13, "limit_val_batches": 0},
]
"""Epochs of five batches."""


def run_alone(
    scratch: Path,
    faults: list[PlannedFault],
    loops: dict[str, Any],
    loaded: list[Any] | None = None,
) -> Any:
    """One rank in this process: its final state and counts, and the losses of all attempts.

    With ``loaded`` a TieredCheckpointManager does the loading, and what it loads is put there.
    """
    scratch.mkdir()
    manager = CheckpointManager()

    def block(call: HPCallWrapper | None = None) -> Any:
        torch.manual_seed(3)
        flags = CheckpointlessCallback(enable_inprocess=True, enable_checkpointless=True)
        trainer: Any = pl.Trainer(
            accelerator="cpu",
            devices=1,
            callbacks=[
                HPFaultInjectionCallback(faults, scratch),
                flags,
            ],
            default_root_dir=scratch,
            **lightning_job.QUIET,
            **loops,
        )
        if loaded is None:
            trainer._checkpoint_connector = CheckpointlessCompatibleConnector(trainer)
        else:
            tiers = TieredCheckpointManager(
                scratch / "run", recovery=manager, policy=SavePolicy(every_steps=2)
            )
            trainer.callbacks.append(TieredCheckpointCallback(tiers))
        trainer.wrapper = call
        model = lightning_job.Model(scratch / "lines")
        batches = lightning_job.loader(shuffle=False, num_samples=20)
        try:
            trainer.fit(model, batches, batches)
        finally:
            if loaded is not None:
                loaded.append(trainer.callbacks[-1].loaded)
        return lightning_job.digest(model, trainer), trainer.global_step, trainer.current_epoch

    wrapper = HPWrapper(checkpoint_manager=manager, finalize=CheckpointlessFinalizeCleanup())
    found = wrapper(block)()
    lines = map(json.loads, (scratch / "lines").read_text().splitlines())
    return found, {tuple(line) for line in lines if line[0] == "loss"}


@pytest.mark.parametrize("loops", LOOPS, ids=str)
def test_faults_one_after_the_other_at_any_point_of_an_epoch_change_nothing(
    loops: dict[str, Any], tmp_path: Path
) -> None:
    rng = random.Random(1)
    undisturbed = run_alone(tmp_path / "undisturbed", [], loops)
    num_steps = undisturbed[0][1]
    for number in range(4):
        faults = [
            PlannedFault(0, rng.randrange(num_steps), rng.choice(list(FaultPoint)))
            for _ in range(4)
        ]

        found = run_alone(tmp_path / str(number), faults, loops)

        assert found == undisturbed, faults


def test_a_manager_of_all_tiers_asks_memory_first(tmp_path: Path) -> None:
    loops: dict[str, Any] = {"max_epochs": 3}
    loaded: list[Any] = []
    faults = [PlannedFault(0, 3, FaultPoint.FORWARD), PlannedFault(0, 6, FaultPoint.AFTER_BACKWARD)]
    undisturbed = run_alone(tmp_path / "undisturbed", [], loops)

    assert run_alone(tmp_path / "faults", faults, loops, loaded=loaded) == undisturbed
    assert [one and (one.tier, one.iteration) for one in loaded] == [
        None,
        (Tier.MEMORY, 3),
        (Tier.MEMORY, 6),
    ]


class Trainer:
    """What callbacks look at before anything runs."""

    def __init__(self, manager: Any = None, callbacks: Any = ()) -> None:
        self.wrapper = HPCallWrapper(HPWrapper(checkpoint_manager=manager))
        self.callbacks = list(callbacks)


class PEFT:
    """Named as NeMo's."""

    params_to_save = frozenset({"a.adapter"})


@pytest.mark.parametrize(
    "flags", [{"enable_checkpointless": True}, {"enable_inprocess": True, "enable_checksum": True}]
)
def test_a_flag_without_the_one_that_it_needs_is_refused(flags: dict[str, bool]) -> None:
    with pytest.raises(StrategyError, match="needs"):
        CheckpointlessCallback(**flags)


def test_the_wrapper_and_the_peft_callback_are_found_on_the_trainer() -> None:
    callback, peft = CheckpointlessCallback(), PEFT()
    trainer = Trainer(callbacks=[callback, peft])

    assert callback.get_wrapper_from_trainer(trainer) is trainer.wrapper
    assert callback.get_peft_callback(trainer) is peft
    assert callback.get_peft_callback(Trainer()) is None
    with pytest.raises(StrategyError, match="no wrapper"):
        callback.get_wrapper_from_trainer(object())


def test_adapters_are_asked_for_once() -> None:
    class Manager(PEFTCheckpointManager):
        num_loads = 0

        def try_checkpointless_load(self, trainer: Any, **_: Any) -> Any:
            self.num_loads += 1
            return {}

    manager, callback = Manager(), CheckpointlessCallback()
    trainer = Trainer(manager)

    assert callback._try_adapter_checkpointless_restore(trainer, {"a"})
    assert not callback._try_adapter_checkpointless_restore(trainer, {"b"})
    assert callback.tried_adapter_checkpointless
    assert (manager.params_to_save, manager.num_loads) == ({"a"}, 1)


def test_without_an_answer_from_memory_the_connector_loads_the_checkpoint(tmp_path: Path) -> None:
    def fit(**options: Any) -> Any:
        trainer: Any = pl.Trainer(
            accelerator="cpu",
            devices=1,
            **lightning_job.QUIET,
            num_sanity_val_steps=0,
            limit_val_batches=0,
            default_root_dir=tmp_path,
            max_steps=options.pop("max_steps"),
            callbacks=[CheckpointlessCallback(enable_inprocess=True, enable_checkpointless=True)],
        )
        trainer._checkpoint_connector = CheckpointlessCompatibleConnector(trainer)
        trainer.wrapper = HPCallWrapper(HPWrapper(checkpoint_manager=CheckpointManager()))
        trainer.fit(boring.BoringModel(), **options)
        return trainer

    first = fit(max_steps=3)
    first.save_checkpoint(tmp_path / "three.ckpt")
    second = fit(max_steps=5, ckpt_path=tmp_path / "three.ckpt")

    assert second.global_step == 5
    assert second.wrapper.wrapper.checkpoint_manager.global_step == 5
    assert not any(torch.isnan(p).any() for p in second.lightning_module.parameters())
