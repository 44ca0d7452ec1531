"""Megatron-Bridge's training with this package's checkpoints, by ``custom_manager_class``.

Importing this imports nothing of Bridge. What it expects there is the same in 0.5, in 0.6 and on
the main branch. See docs/stacks.md.
"""

from importlib import import_module
from typing import Any

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import MissingDependencyError, StrategyError
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.megatron.types import raises_megatron_errors
from dist_ckpt_strategies.sharded.async_request import SaveQueue
from dist_ckpt_strategies.strategies.install import install

__all__ = ["PackCheckpointManager"]


class PackCheckpointManager:
    """Bridge's own checkpoint manager, which saves packs and loads every format.

    It is made by ``create_checkpoint_manager`` of Bridge, on every rank. Making it calls
    ``dist_ckpt_strategies.install``, so what Bridge saves and loads beside it, such as a base model
    for PEFT, goes through this package too. Saves in the background use this package's queue, which
    starts no worker; with local checkpoints, which are NVRx's, Bridge's queue is used.

    Args:
        checkpoint_config: Bridge's CheckpointConfig.
        allow: further classes that objects of a checkpoint may have; for a subclass to pass.
        options: timeouts and memory bounds; by default from the environment.

    Raises:
        StrategyError: ``ckpt_format`` is not torch_dist: Bridge would save by torch DCP.
        MissingDependencyError: Bridge cannot be imported.
    """

    @raises_megatron_errors
    def __init__(
        self, checkpoint_config: Any, *, allow: Allowed = (), options: Options | None = None
    ) -> None:
        if checkpoint_config.ckpt_format != "torch_dist":
            raise StrategyError(
                "PackCheckpointManager: expected ckpt_format='torch_dist', by which Bridge calls "
                f"Megatron-Core's save and load, found {checkpoint_config.ckpt_format!r}"
            )
        try:
            bridge: Any = import_module("megatron.bridge.training.checkpointing")
        except ImportError as error:
            raise MissingDependencyError(
                f"megatron.bridge.training.checkpointing: {error}; expected Megatron-Bridge and "
                "what it needs"
            ) from error
        install(allow=allow, options=options)
        self.checkpoint_config = checkpoint_config
        self._theirs = bridge.DefaultCheckpointManager(checkpoint_config)

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """The state that Bridge keeps between saves and loads; its setup reads it."""
        context: dict[str, Any] = self._theirs.checkpointing_context
        return context

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Save, or begin to with ``async_save``. Collective."""
        config, state = self.checkpoint_config, ctx.state
        if config.async_save and config.non_persistent_ckpt_type != "local":
            queue = state.async_calls_queue
            if not isinstance(queue, SaveQueue):
                if queue is not None:  # Bridge starts its worker at set-up
                    # Of a worker that has died, the end would be waited for without a limit.
                    queue.close(abort=not queue.get_num_unfinalized_calls())
                state._async_calls_queue = SaveQueue()  # noqa: SLF001 - so Bridge sets it too
        self._theirs.save(ctx, callback_manager)

    def load(self, ctx: Any) -> tuple[int, int]:
        """Iteration and floating-point operations of what was loaded; 0, 0: nothing. Collective."""
        loaded: tuple[int, int] = self._theirs.load(ctx)
        return loaded

    def finalize_async_saves(
        self,
        state: Any,
        blocking: bool = False,  # noqa: FBT001, FBT002 - Bridge's signature
        terminate: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Make saves visible that have ended on all ranks; with ``blocking`` all. Collective.

        A save that has failed on any rank raises on every rank.
        """
        self._theirs.finalize_async_saves(state, blocking=blocking, terminate=terminate)
