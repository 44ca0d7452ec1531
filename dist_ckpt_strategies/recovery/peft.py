"""Recovery of fine-tuning, where most of the model never changes."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.device import await_gpu
from dist_ckpt_strategies.recovery.manager import InMemoryCheckpointManager
from dist_ckpt_strategies.recovery.plan import Phase
from dist_ckpt_strategies.recovery.provider import (
    HeldTensors,
    InMemoryCheckpoint,
    MemoryChecksumManager,
    Shards,
    StateProvider,
    provider_of,
)
from dist_ckpt_strategies.recovery.recover import Recovery

_BASE = "base model"


class PEFTCheckpointManager(InMemoryCheckpointManager):
    """An in-memory manager that keeps the frozen base model apart from what is trained.

    The base model is noted once, when its state is first tracked or saved, and kept through all
    recoveries; what each recovery moves is the adapters, the optimizer and the objects. Of the base
    model are the parameters of the provider's shards (``torch.nn.Parameter``) that need no gradient
    and are not adapters by name. In the block::

        if manager.try_base_model_checkpointless_load(provider) is None:
            ...                                # load the base model
        if manager.try_checkpointless_load(provider) is None:
            ...                                # start, or load the adapters from a checkpoint
        manager.track(provider)

    With ``enable_checksum`` a base model that is not what it was when it was noted is not used, and
    the copies of the others are compared.

    Attributes:
        params_to_save: names of parameters that are adapters.
        base_model_weights: the base model's tensors by ``shard/name``; None before they are noted.
        base_model_keys_to_extract: their keys, sorted.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params_to_save: set[str] = set()
        self.base_model_weights: dict[str, torch.Tensor] | None = None
        self.base_model_keys_to_extract: list[str] | None = None
        self._base_checksums = MemoryChecksumManager()

    def is_adapter_key(self, key: str | tuple[str, torch.Tensor]) -> bool:
        """Whether a key is of an adapter: by name, or as ``(name, parameter)`` by its gradient."""
        if isinstance(key, tuple):
            return bool(key[1].requires_grad)
        return key in self.params_to_save or ".adapter." in key or key.endswith(".adapters")

    def maybe_save_base_model(self, trainer: Any) -> None:
        """Note the base model's weights, by reference; nothing where that has been done."""
        if self.base_model_weights is None:
            self._note_base(self._base_of(provider_of(trainer)))

    def save_checkpoint(self, trainer: Any) -> None:
        """See InMemoryCheckpointManager; notes the base model too."""
        self.maybe_save_base_model(trainer)
        super().save_checkpoint(trainer)

    def track(self, provider: Any, **groups: Any) -> None:
        """See InMemoryCheckpointManager; notes the base model too."""
        super().track(provider, **groups)
        self.maybe_save_base_model(provider)

    def maybe_offload_checkpoint(self) -> None:
        """See InMemoryCheckpointManager; moves the base model's weights to the host too."""
        super().maybe_offload_checkpoint()
        if self.enable_offload and self.base_model_weights is not None:
            self.base_model_weights = {
                name: tensor.to("cpu") for name, tensor in self.base_model_weights.items()
            }

    def try_base_model_checkpointless_load(
        self, trainer: Any, *, group: ProcessGroup | None = None
    ) -> dict[str, Any] | None:
        """Fill the base model from memory, as ``try_checkpointless_load`` the rest. Collective.

        What is noted of the base model stays, whether it succeeded or not; but what was damaged in
        memory is replaced.
        """
        provider = provider_of(trainer)
        weights, self._is_filling = self.base_model_weights, False
        old = None if weights is None else HeldTensors(lambda: {_BASE: weights})
        recovery = Recovery(
            self._communicator(group),
            HeldTensors(lambda: {_BASE: self._base_of(provider)}),
            None if old is None else InMemoryCheckpoint(old, 0, Phase.RUNNING),
            why="has no base model",
            random_states=None,
            checksums=self._base_checksums if self.enable_checksum else None,
        )

        report = self._answer(
            lambda: recovery.run(
                recovery.plan(),
                finish_step=lambda: None,
                adopt=lambda *_: self._note_base(self._base_of(provider)),
                on_filling=self._note_filling,
            )
        )
        if report is None:
            self._require_unfilled()
            return None
        return asdict(report)

    def _note_base(self, weights: Mapping[str, torch.Tensor]) -> None:
        await_gpu(self._gpu_timeout_s, "base model")  # a broadcast may have filled it
        self.base_model_weights = dict(weights)
        self.base_model_keys_to_extract = sorted(weights)
        if self.enable_checksum:
            self._base_checksums.record(0, {_BASE: weights})

    def _base_of(self, provider: StateProvider) -> dict[str, torch.Tensor]:
        return {
            f"{shard_id}/{name}": tensor.detach()
            for shard_id, tensors in provider.parts().items()
            for name, tensor in tensors.items()
            if self._is_base(name, tensor)
        }

    def _is_base(self, name: str, tensor: torch.Tensor) -> bool:
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        is_adapter = self.is_adapter_key(name) or self.is_adapter_key((name, tensor))
        return is_parameter and not is_adapter

    def _shards_of(self, provider: StateProvider) -> Shards:
        """Without the base model."""
        return {
            shard_id: {n: t for n, t in tensors.items() if not self._is_base(n, t)}
            for shard_id, tensors in provider.parts().items()
        }
