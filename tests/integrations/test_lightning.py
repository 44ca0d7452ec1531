"""Trainings with real Lightning: faults, preemption, and the same result to the bit."""

import os
import random
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pl = pytest.importorskip("lightning.pytorch")
boring = pytest.importorskip("lightning.pytorch.demos.boring_classes")

from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

from dist_ckpt_strategies import ManagerOptions, SavePolicy, TieredCheckpointManager  # noqa: E402
from dist_ckpt_strategies.errors import StrategyError  # noqa: E402
from dist_ckpt_strategies.inprocess import (  # noqa: E402
    CheckpointlessAbortManager,
    CheckpointlessFinalizeCleanup,
    CudaHealthCheck,
    HPCallWrapper,
    HPWrapper,
)
from dist_ckpt_strategies.integrations.lightning import (  # noqa: E402
    CheckpointlessCallback,
    CheckpointlessCompatibleConnector,
    FaultKind,
    FaultPoint,
    PlannedFault,
    TieredCheckpointCallback,
)
from dist_ckpt_strategies.integrations.lightning_state import call_after_closure, clear_tensor_hooks  # noqa: E402
from dist_ckpt_strategies.recovery import CheckpointManager, PEFTCheckpointManager  # noqa: E402
from tests.integrations.lightning_training import QUIET, Model, fit, loader, notes  # noqa: E402
from tests.support.ranks import RankDiedError, run_processes  # noqa: E402
from tests.support.restarts import Wrappers, run_respawned  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice

NUM_RANKS = 4
FAULTS = [
    PlannedFault(1, 2, FaultPoint.FORWARD),
    PlannedFault(0, 5, FaultPoint.BATCH_START),
    PlannedFault(2, 6, FaultPoint.AFTER_BACKWARD, FaultKind.KILL),
    PlannedFault(3, 8, FaultPoint.BEFORE_OPTIMIZER_STEP),
    PlannedFault(1, 10, FaultPoint.BATCH_END),
]
"""Step 5 is the first of an epoch, step 10 begins when the last batch of one has ended."""


def under_torchrun(size: int) -> None:
    """Lightning makes no processes of its own."""
    os.environ |= {"LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}


def on_rank(rank: int, wrappers: Wrappers, scratch: Path, faults: list[PlannedFault]) -> Any:
    under_torchrun(NUM_RANKS)
    wrapper = wrappers(
        abort=CheckpointlessAbortManager.get_default_checkpointless_abort(),
        finalize=CheckpointlessFinalizeCleanup(),
        health_check=CudaHealthCheck(),
        checkpoint_manager=CheckpointManager(timeout_s=60),
        progress_timeout_s=60,
    )

    def block(call: HPCallWrapper | None = None) -> Any:
        torch.manual_seed(7 + rank)
        strategy = DDPStrategy(
            process_group_backend="interruptible_gloo",
            find_unused_parameters=True,  # the same buckets in the first step of every attempt
            timeout=timedelta(seconds=60),
        )
        model = Model(scratch / f"lines{rank}-{os.getpid()}")
        options: Any = {"devices": NUM_RANKS, "strategy": strategy, "gradient_clip_val": 0.5}
        data = loader(80, shuffle=True), loader(80)
        return fit(
            model, scratch, *data, faults=faults, call=call, max_steps=13, max_epochs=-1, **options
        )

    return wrapper(block)()


@pytest.mark.multiprocess
def test_exceptions_and_a_killed_rank_leave_the_result_as_it_is_without_them(
    tmp_path: Path,
) -> None:
    found = []
    for name, faults in (("undisturbed", []), ("faults", FAULTS)):
        (tmp_path / name).mkdir()
        results, died = run_respawned(
            NUM_RANKS, on_rank, tmp_path / name, faults, timeout_s=270 if faults else 120
        )
        assert died == [2] * bool(faults)
        found.append((results, notes(tmp_path / name, "loss")))

    assert len(found[0][1]) == NUM_RANKS * 13
    assert found[1] == found[0]
    steps: dict[int, int | None] = {0: None} | {step: step for step in (2, 5, 6, 8, 10)}
    starts = {(rank, *start) for rank in range(NUM_RANKS) for start in steps.items()}
    assert notes(tmp_path / "faults", "start") == starts


LOOPS: list[dict[str, Any]] = [
    {"max_epochs": 3},
    {"max_epochs": 3, "accumulate_grad_batches": 2},
    {"max_epochs": 3, "val_check_interval": 2},
    {"max_epochs": -1, "max_steps": 13, "limit_val_batches": 0},
]
"""Epochs of five batches."""


def run_alone(
    scratch: Path, faults: list[PlannedFault], loops: dict[str, Any], *, is_tiered: bool = False
) -> Any:
    """One rank in this process: its final state and counts, and the losses of all attempts."""
    scratch.mkdir()
    manager = CheckpointManager()

    def block(call: HPCallWrapper | None = None) -> Any:
        torch.manual_seed(3)
        callbacks = []
        if is_tiered:
            policy = SavePolicy(every_steps=2)
            tiers = TieredCheckpointManager(scratch / "run", recovery=manager, policy=policy)
            callbacks.append(TieredCheckpointCallback(tiers))
        options: Any = {"callbacks": callbacks, "loads": not is_tiered, "devices": 1} | loops
        data = loader(20), loader(20)
        return fit(Model(scratch / "lines"), scratch, *data, faults=faults, call=call, **options)

    wrapper = HPWrapper(checkpoint_manager=manager, finalize=CheckpointlessFinalizeCleanup())
    return wrapper(block)(), notes(scratch, "loss")


@pytest.mark.slow
@pytest.mark.parametrize("loops", LOOPS, ids=str)
def test_faults_one_after_the_other_at_any_point_of_an_epoch_change_nothing(
    loops: dict[str, Any], tmp_path: Path
) -> None:
    rng = random.Random(1)
    undisturbed = run_alone(tmp_path / "undisturbed", [], loops)
    num_steps = undisturbed[0][1]
    for number in range(2):
        faults = [
            PlannedFault(0, rng.randrange(num_steps), rng.choice(list(FaultPoint)))
            for _ in range(4)
        ]

        found = run_alone(tmp_path / str(number), faults, loops)

        assert found == undisturbed, faults


@pytest.mark.slow
def test_a_manager_of_all_tiers_asks_memory_first(tmp_path: Path) -> None:
    faults = [PlannedFault(0, 3, FaultPoint.FORWARD), PlannedFault(0, 6, FaultPoint.AFTER_BACKWARD)]
    undisturbed = run_alone(tmp_path / "undisturbed", [], LOOPS[0])

    assert run_alone(tmp_path / "faults", faults, LOOPS[0], is_tiered=True) == undisturbed
    assert notes(tmp_path / "faults", "start") == {(0, 0, None), (0, 3, 3), (0, 6, 6)}


def is_preempted(rank: int, root: Path, preempted_in: int | None) -> Any:
    """Body of a rank, without a wrapper: the iteration that it began at, its losses and the end."""
    under_torchrun(2)
    torch.manual_seed(rank)
    policy, options = SavePolicy(every_steps=2, keep_last=2), ManagerOptions(timeout_s=60)
    callback = TieredCheckpointCallback(
        TieredCheckpointManager(root / "run", policy=policy, options=options)
    )
    lines = root / f"lines{rank}"
    lines.unlink(missing_ok=True)
    model = Model(lines, 0.0, preempted_in)  # random numbers are not in these checkpoints
    strategy = DDPStrategy(find_unused_parameters=True)
    loops: Any = {"devices": 2, "strategy": strategy, "max_steps": 9, "max_epochs": -1}
    state = fit(model, root, loader(32, shuffle=True), callbacks=[callback], **loops)
    return callback.loaded and callback.loaded.iteration, lines.read_text().splitlines(), state


@pytest.mark.multiprocess
def test_a_preempted_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    for name in ("preempted", "undisturbed"):
        (tmp_path / name).mkdir()
    saved = TieredCheckpointManager(tmp_path / "preempted" / "run")
    first = run_processes(2, is_preempted, tmp_path / "preempted", 4)
    assert saved.all_steps()[-1] == 5  # in the second epoch
    second = run_processes(2, is_preempted, tmp_path / "preempted", None)
    undisturbed = run_processes(2, is_preempted, tmp_path / "undisturbed", None)

    assert [isinstance(one, RankDiedError) and one.exit_code for one in first] == [143, 143]
    for one, whole in zip(second, undisturbed, strict=True):
        assert (one[0], whole[0]) == (5, None)
        assert one[1] == whole[1][5:]
        assert one[2] == whole[2]
    assert saved.all_steps() == [6, 8]


Callback: Any = pl.Callback


class Forgetting(Callback):  # type: ignore[misc]
    """Goes on with an optimizer that is made anew, and with another rate."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.optimizers = [pl_module.configure_optimizers()["optimizer"]]
        trainer.optimizers[0].param_groups[0]["lr"] = 7.0


def test_the_first_resume_is_compared_with_its_checkpoint(tmp_path: Path) -> None:
    def report(num_steps: int, *others: Any) -> Any:
        manager = TieredCheckpointManager(tmp_path / "run", policy=SavePolicy(every_steps=2))
        callback = TieredCheckpointCallback(manager)
        steps: Any = {"max_steps": num_steps, "max_epochs": -1, "devices": 1}
        data = loader(32, shuffle=True)
        fit(Model(tmp_path / "lines"), tmp_path, data, callbacks=[*others, callback], **steps)
        return callback.report

    assert report(5) is None
    assert (honest := report(9)).is_equal, str(honest)
    found = report(10, Forgetting())
    assert any("exp_avg" in one.key for one in found.arrays), str(found)
    assert all("/optimizer/" in one.key for one in found.arrays), str(found)
    assert any("'lr'" in one.where for one in found.objects), str(found)


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
    def trained(max_steps: int, **options: Any) -> Any:
        trainer: Any = pl.Trainer(
            **QUIET,
            devices=1,
            limit_val_batches=0,
            default_root_dir=tmp_path,
            max_steps=max_steps,
            callbacks=[CheckpointlessCallback(enable_inprocess=True, enable_checkpointless=True)],
        )
        trainer._checkpoint_connector = CheckpointlessCompatibleConnector(trainer)
        trainer.wrapper = HPCallWrapper(HPWrapper(checkpoint_manager=CheckpointManager()))
        trainer.fit(boring.BoringModel(), **options)
        return trainer

    trained(3).save_checkpoint(tmp_path / "three.ckpt")
    found = trained(5, ckpt_path=tmp_path / "three.ckpt")

    assert found.global_step == 5
    assert found.wrapper.wrapper.checkpoint_manager.global_step == 5
    assert not any(torch.isnan(p).any() for p in found.lightning_module.parameters())


def test_a_call_comes_after_the_closure_and_in_the_place_of_an_earlier_one() -> None:
    seen: list[str] = []
    plugin = SimpleNamespace(_after_closure=lambda: seen.append("closure"))

    call_after_closure(plugin, lambda: seen.append("first"))
    call_after_closure(plugin, lambda: seen.append("second"))
    plugin._after_closure()

    assert seen == ["closure", "second"]
    with pytest.raises(StrategyError, match="_after_closure"):
        call_after_closure(object(), lambda: None)


def test_hooks_are_taken_off_the_tensors_of_a_device() -> None:
    tensor = torch.ones(2, requires_grad=True)
    seen: list[Any] = []
    tensor.register_hook(seen.append)  # type: ignore[no-untyped-call]

    assert clear_tensor_hooks("meta") == 0
    assert clear_tensor_hooks("cpu") >= 1
    tensor.sum().backward()  # type: ignore[no-untyped-call]

    assert seen == []
