"""Lightning trainings that survive faults: callbacks, a checkpoint connector, faults on purpose.

Needs Lightning: the package ``lightning``, or else ``pytorch_lightning``.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.errors import MissingDependencyError, StrategyError
from dist_ckpt_strategies.integrations.lightning_faults import (
    FaultKind,
    FaultPoint,
    InjectedFaultError,
    PlannedFault,
    cause_fault,
)
from dist_ckpt_strategies.integrations.lightning_state import (
    LightningStateProvider,
    LoopState,
    clear_tensor_hooks,
    manager_of,
    peft_callback_of,
    wrapper_of,
)
from dist_ckpt_strategies.manager.candidates import Loaded, Tier
from dist_ckpt_strategies.manager.manager import TieredCheckpointManager
from dist_ckpt_strategies.recovery import PEFTCheckpointManager, Phase
from dist_ckpt_strategies.strategies.compare_report import CompareReport

__all__ = [
    "CheckpointlessCallback",
    "CheckpointlessCompatibleConnector",
    "FaultKind",
    "FaultPoint",
    "HPFaultInjectionCallback",
    "InjectedFaultError",
    "LightningStateProvider",
    "PlannedFault",
    "TieredCheckpointCallback",
]

_FITTING = "fit"


def _of_lightning(module: str, name: str) -> Any:
    """A class of Lightning's; a MissingDependencyError if that is not installed."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return getattr(import_module(f"{package}.{module}"), name)
        except ModuleNotFoundError as error:
            missing = error
    raise MissingDependencyError(
        "dist_ckpt_strategies.integrations.lightning needs Lightning: pip install lightning"
    ) from missing


_Callback: Any = _of_lightning("callbacks", "Callback")
_CheckpointConnector: Any = _of_lightning(
    "trainer.connectors.checkpoint_connector", "_CheckpointConnector"
)


class CheckpointlessCallback(_Callback):  # type: ignore[misc]
    """Reports the progress of each step of a Lightning training to the wrapper and its manager.

    The trainer is made in the block; ``trainer.wrapper`` is the HPCallWrapper of the call. Give it
    as the last of the callbacks that change what the next step sees.

    What is drawn between two steps (validation, loading of data) does not move the random numbers
    of the next step: each begins with those of the step commit before it.

    Args:
        enable_inprocess: report progress to the wrapper, and count steps.
        enable_checkpointless: commit each step, hold the lock during its update, and keep the
            state. Needs ``enable_inprocess``.
        enable_checksum: have the manager compare checksums. Needs ``enable_checkpointless``.
        clean_tensor_hook: after a fault, take all hooks off CUDA tensors. Looks at every object.
        clean_lightning_module: after a fault, let go of what the trainer holds, through the
            wrapper's CheckpointlessFinalizeCleanup.

    Attributes:
        tried_adapter_checkpointless: whether adapters have been asked for from memory.

    Raises:
        StrategyError: a flag is set without the one that it needs.
    """

    def __init__(
        self,
        enable_inprocess: bool = False,  # noqa: FBT001, FBT002 - the kept signature
        enable_checkpointless: bool = False,  # noqa: FBT001, FBT002
        enable_checksum: bool = False,  # noqa: FBT001, FBT002
        clean_tensor_hook: bool = False,  # noqa: FBT001, FBT002
        clean_lightning_module: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        super().__init__()
        if enable_checkpointless and not enable_inprocess:
            raise StrategyError("enable_checkpointless=True needs enable_inprocess=True")
        if enable_checksum and not enable_checkpointless:
            raise StrategyError("enable_checksum=True needs enable_checkpointless=True")
        self.enable_inprocess = enable_inprocess
        self.enable_checkpointless = enable_checkpointless
        self.enable_checksum = enable_checksum
        self.clean_tensor_hook = clean_tensor_hook
        self.clean_lightning_module = clean_lightning_module
        self.tried_adapter_checkpointless = False
        self._is_in_step = False

    get_wrapper_from_trainer = staticmethod(wrapper_of)
    get_peft_callback = staticmethod(peft_callback_of)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the trainer its StateProvider; see Lightning."""
        if stage != _FITTING or not self.enable_inprocess:
            return
        wrapper = wrapper_of(trainer)
        if self.enable_checkpointless:
            if isinstance(getattr(trainer, "state_provider", None), LightningStateProvider | None):
                trainer.state_provider = LightningStateProvider(trainer)
            manager = manager_of(trainer)
            manager.enable_checksum = manager.enable_checksum or self.enable_checksum
        register = getattr(wrapper.wrapper.finalize, "register_attributes", None)
        if self.clean_lightning_module and register is not None:
            register(trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Ask for adapters, where no connector of ours does it; see Lightning."""
        peft = self.get_peft_callback(trainer)
        has_connector = isinstance(trainer._checkpoint_connector, CheckpointlessCompatibleConnector)  # noqa: SLF001
        if self.enable_checkpointless and peft is not None and not has_connector:
            self._try_adapter_checkpointless_restore(trainer, set(peft.params_to_save))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Track the state, which is loaded by now, and have the data go on from there."""
        if not self.enable_checkpointless:
            return
        manager, provider = manager_of(trainer), trainer.state_provider
        if isinstance(provider, LoopState):
            provider.begin_training(lambda: self._gradients_are_final(trainer))
        manager.save_checkpoint(trainer)
        manager.track(provider)
        self._is_in_step = False

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *args: Any, **kwargs: Any
    ) -> None:
        """Report progress; where an update's first batch begins, the step begins."""
        if not self.enable_inprocess:
            return
        wrapper_of(trainer).ping()
        if self._is_in_step:
            return
        self._is_in_step = True
        if self.enable_checkpointless:
            manager = manager_of(trainer)
            manager.begin_step()
            manager.load_rng_states()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Give the parameter update lock back, where this batch's update has taken it."""
        if not self.enable_inprocess or trainer.fit_loop._should_accumulate():  # noqa: SLF001
            return
        self._is_in_step = False
        wrapper_of(trainer).step_upon_restart += 1
        if not self.enable_checkpointless:
            return
        manager, provider = manager_of(trainer), trainer.state_provider
        if manager.phase is Phase.UPDATING:
            if isinstance(provider, LoopState):
                provider.capture()
            manager.end_update()
        if manager.phase is Phase.UPDATED:
            manager.end_step()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the state where it is: a recovery takes it over, or finds it inconsistent."""
        if not self.enable_inprocess:
            return
        if self.enable_checkpointless:
            manager_of(trainer).abandon_update()
            # Moving it off its device would be a copy, and for an update on another device.
            trainer.strategy.teardown = lambda: None
        if self.clean_tensor_hook:
            clear_tensor_hooks("cuda")

    def _gradients_are_final(self, trainer: Any) -> None:
        manager = manager_of(trainer)
        manager.vote()
        manager.begin_update()

    def _try_adapter_checkpointless_restore(self, trainer: Any, params_to_save: set[str]) -> bool:
        """Fill adapters, optimizer and objects from memory, once; whether they are. Collective."""
        manager = manager_of(trainer)
        if self.tried_adapter_checkpointless or not isinstance(manager, PEFTCheckpointManager):
            return False
        self.tried_adapter_checkpointless = True
        manager.params_to_save = set(params_to_save)
        return manager.try_checkpointless_load(trainer) is not None


class TieredCheckpointCallback(_Callback):  # type: ignore[misc]
    """Saves a Lightning training by a TieredCheckpointManager, and continues from the newest state.

    ``fit`` needs no ``ckpt_path``: it begins with what the manager loads, if there is anything.
    Saved is what LightningStateProvider has, under the number of the trainer's ``global_step``;
    the manager's policy says when. Needs a strategy whose ranks all hold everything. Give it as
    the last of the callbacks.

    Args:
        manager: closed when the training ends. One with ``recovery`` asks memory first, beside a
            CheckpointlessCallback; a CheckpointlessCompatibleConnector is not needed then.

        check_resume: compare the state with what was loaded before the first step, and log what
            differs; see ``TieredCheckpointManager.check_resume``. Loops and callbacks, which have
            begun then, are left out.

    Attributes:
        loaded: what the manager has found; None before that, and where there was nothing.
        report: of ``check_resume``; None where nothing was compared.
    """

    def __init__(self, manager: TieredCheckpointManager, *, check_resume: bool = True) -> None:
        super().__init__()
        self.manager, self.check_resume = manager, check_resume
        self.loaded: Loaded | None = None
        self.report: CompareReport | None = None
        self._provider: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the newest state. Collective."""
        provider = getattr(trainer, "state_provider", None)
        if not isinstance(provider, LightningStateProvider):
            provider = trainer.state_provider = LightningStateProvider(trainer)
        self._provider = provider
        self.loaded = self.manager.load_latest(provider.sharded_state_dict(), trainer)
        if self.loaded is not None and self.loaded.tier is not Tier.MEMORY:
            provider.load_objects(self.loaded.state["objects"])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Have the data go on from there; see Lightning."""
        if self.check_resume and self.loaded is not None:
            self.report = self.manager.check_resume(self._provider.resumed_state_dict)
        if not any(getattr(one, "enable_checkpointless", False) for one in trainer.callbacks):
            self._provider.begin_training(lambda: None)

    def on_train_batch_end(self, trainer: Any, *_a: Any, **_kw: Any) -> None:
        """Save the step, if it has ended and the policy says so. Collective."""
        if not trainer.fit_loop._should_accumulate():  # noqa: SLF001
            self.manager.save(trainer.global_step, self._state_dict)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the manager. Collective."""
        self.manager.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give up the manager's lock: other ranks may be elsewhere."""
        self.manager.release()

    def _state_dict(self) -> dict[str, Any]:
        self._provider.capture()
        return self._provider.sharded_state_dict()  # type: ignore[no-any-return]


class CheckpointlessCompatibleConnector(_CheckpointConnector):  # type: ignore[misc]
    """Lightning's checkpoint connector, which asks the memory of the ranks first.

    In the block: ``trainer._checkpoint_connector = CheckpointlessCompatibleConnector(trainer)``.
    A strategy that loads before it is set up has no optimizer yet, so there the whole restore comes
    after that. Where memory has no answer, what ``trainer.fresume`` finds (NeMo's AutoResume),
    or else the path that ``fit`` was given, is loaded as ever.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._loaded_checkpoint: dict[str, Any] = {}
        self._deferred: tuple[Any, dict[str, Any]] | None = None
        self._is_last_chance = False

    def resume_start(self, checkpoint_path: Any = None, **kwargs: Any) -> None:
        """Fill the state from memory, or read the checkpoint. Collective."""
        callback = self._callback()
        if self.trainer.state.fn != _FITTING or callback is None:
            super().resume_start(checkpoint_path, **kwargs)
            return
        if not self.trainer.optimizers and not self._is_last_chance:
            self._deferred = (checkpoint_path, kwargs)
            return
        if self._recovered(callback):
            self._loaded_checkpoint = {}
            return
        super().resume_start(self._found_path(checkpoint_path), **kwargs)

    def restore_training_state(self) -> None:
        """See Lightning; comes after the strategy's setup."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._is_last_chance = True
            path, kwargs = deferred
            self._restore_modules_and_callbacks(path, **kwargs)
        super().restore_training_state()

    def resume_end(self) -> None:
        """See Lightning: what was read is released, and all ranks are there."""
        super().resume_end()
        self._is_last_chance = False
        if self.trainer.state.fn == _FITTING and self._callback() is not None:
            self.trainer.state_provider.objects()  # as they were loaded: the loops change next

    def _callback(self) -> CheckpointlessCallback | None:
        for one in self.trainer.callbacks:
            if isinstance(one, CheckpointlessCallback) and one.enable_checkpointless:
                return one
        return None

    def _recovered(self, callback: CheckpointlessCallback) -> bool:
        manager, peft = manager_of(self.trainer), peft_callback_of(self.trainer)
        provider = self.trainer.state_provider
        why = provider.why_declined() if isinstance(provider, LoopState) else ""
        if why:
            manager.decline(why)
            return False
        if not isinstance(manager, PEFTCheckpointManager):
            return manager.try_checkpointless_load(self.trainer) is not None
        params = manager.params_to_save if peft is None else set(peft.params_to_save)
        manager.params_to_save = params
        if manager.try_base_model_checkpointless_load(self.trainer) is None:
            manager.delete_checkpoint()
            return False
        return callback._try_adapter_checkpointless_restore(self.trainer, params)  # noqa: SLF001

    def _found_path(self, checkpoint_path: Any) -> Any:
        resume = getattr(self.trainer, "fresume", None)
        if resume is None:
            return checkpoint_path
        resume.setup(self.trainer, self.trainer.lightning_module, force_setup=True)
        return self._ckpt_path or checkpoint_path


def _reaching(point: FaultPoint) -> Callable[..., None]:
    """A hook of Lightning's for one point of a step."""
    return lambda self, *_a, **_kw: self._reach(point)


class HPFaultInjectionCallback(_Callback):  # type: ignore[misc]
    """Makes ranks fail at points of their steps; for tests of a training's recovery.

    Args:
        faults: of all ranks, each of which happens once.
        directory: where it is noted which have happened; the same in all attempts.
    """

    def __init__(self, faults: Sequence[PlannedFault], directory: str | Path) -> None:
        super().__init__()
        self._faults = tuple(faults)
        self._directory = Path(directory)
        self._trainer: Any = None

    def register_hooks(self, trainer: Any) -> None:
        """Have the forward pass of the module's first part come by here. Again does nothing."""
        if self._trainer is trainer:
            return
        self._trainer = trainer
        for part in trainer.lightning_module.children():
            part.register_forward_hook(lambda *_: self._reach(FaultPoint.FORWARD))
            break

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """See Lightning."""
        self.register_hooks(trainer)

    on_train_batch_start = _reaching(FaultPoint.BATCH_START)
    on_before_backward = _reaching(FaultPoint.AFTER_FORWARD)
    on_after_backward = _reaching(FaultPoint.AFTER_BACKWARD)
    on_before_optimizer_step = _reaching(FaultPoint.BEFORE_OPTIMIZER_STEP)
    on_train_batch_end = _reaching(FaultPoint.BATCH_END)

    def _reach(self, point: FaultPoint) -> None:
        trainer = self._trainer
        if trainer is None or not trainer.training:
            return
        here = (trainer.global_rank, trainer.global_step, point)
        for number, fault in enumerate(self._faults):
            note = self._directory / f"fault{number}"
            if (fault.global_rank, fault.step, fault.point) == here and not note.exists():
                note.touch()
                cause_fault(fault)
