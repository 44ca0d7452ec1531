"""Recovery of fine-tuning, where most of the model never changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from dist_ckpt_strategies.comm.torch_group import ProcessGroup
from dist_ckpt_strategies.errors import CheckpointError, PeerLostError, PeerTimeoutError
from dist_ckpt_strategies.plan.recover import HeldState, RankFacts
from dist_ckpt_strategies.recovery.kept_state import PartsView
from dist_ckpt_strategies.recovery.manager import CheckpointManager
from dist_ckpt_strategies.recovery.provider import HasStateProvider, provider_of
from dist_ckpt_strategies.run.flat_parts import FlatPart
from dist_ckpt_strategies.run.recover import Survivor, gather_facts, plan_recovery, run_recovery
from dist_ckpt_strategies.run.state_provider import StateProvider
from dist_ckpt_strategies.spec.phase import Phase

_BASE = "base model"


class PEFTCheckpointManager(CheckpointManager):
    """A CheckpointManager that keeps the frozen base model apart from what is trained.

    The base model is noted once and kept through all recoveries; what each recovery moves is the
    adapters, the optimizer and the objects. Of the base model are the parameters of the provider's
    parts (``torch.nn.Parameter``) that need no gradient and are not adapters by name.

    Attributes:
        params_to_save: names of parameters that are adapters.
        base_model_weights: the base model's tensors by ``part/name``; None before they are noted.
        base_model_keys_to_extract: their keys, sorted.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params_to_save: set[str] = set()
        self.base_model_weights: dict[str, torch.Tensor] | None = None
        self.base_model_keys_to_extract: list[str] | None = None

    def is_adapter_key(self, key: str | tuple[str, torch.Tensor]) -> bool:
        """Whether a key is of an adapter: by name, or as ``(name, parameter)`` by its gradient."""
        if isinstance(key, tuple):
            return bool(key[1].requires_grad)
        return key in self.params_to_save or ".adapter." in key or key.endswith(".adapters")

    def maybe_save_base_model(self, trainer: StateProvider | HasStateProvider) -> None:
        """Note the base model's weights, by reference; nothing where that has been done."""
        if self.base_model_weights is None:
            self._note_base(self._base_of(provider_of(trainer)))

    def save_checkpoint(self, trainer: StateProvider | HasStateProvider) -> None:
        """See CheckpointManager; notes the base model too."""
        self.maybe_save_base_model(trainer)
        super().save_checkpoint(trainer)

    def maybe_offload_checkpoint(self) -> None:
        """See CheckpointManager; moves the base model's weights to the host too."""
        super().maybe_offload_checkpoint()
        if self.enable_offload and self.base_model_weights is not None:
            self.base_model_weights = {
                name: tensor.to("cpu") for name, tensor in self.base_model_weights.items()
            }

    def try_base_model_checkpointless_load(
        self, trainer: StateProvider | HasStateProvider, *, group: ProcessGroup | None = None
    ) -> dict[str, Any] | None:
        """Fill the base model from memory, this rank's own or that of others.

        Collective. What is noted of the base model stays, whether it succeeded or not.

        Args:
            trainer: whose base model is to be filled.
            group: ranks that take part; None for the world.

        Returns:
            What was done; None, on all ranks alike, where it cannot be done.

        Raises:
            PeerTimeoutError, PeerLostError: a rank does not take part any more.
        """
        provider = provider_of(trainer)
        new = self._base_of(provider)
        comm = self._communicator(group)
        everyone = {(comm.global_rank(rank), 0): b"" for rank in range(comm.size)}
        weights = self.base_model_weights
        old = None if weights is None else _bare(provider, weights)

        def describe() -> RankFacts:
            held = () if weights is None else (FlatPart(_BASE, weights).facts(),)
            return RankFacts(
                (FlatPart(_BASE, new).facts(),),
                (),
                None if weights is None else HeldState(0, Phase.RUNNING, held),
                random_states=() if weights is None else tuple(sorted(everyone)),
            )

        try:
            facts = gather_facts(comm, describe)
            parts = [{_BASE: FlatPart(_BASE, found)} for found in (new, weights or {})]
            plan = plan_recovery(comm, facts, parts)
            survivor = None if old is None else Survivor(old, 0, Phase.RUNNING, old.apply_update)
            target = _bare(provider, new)
            known = {} if weights is None else everyone
            recovered = run_recovery(comm, plan, survivor, target, known)
        except (PeerTimeoutError, PeerLostError):
            raise
        except CheckpointError as error:
            self._refuse(error)
            return None
        self._note_base(new)
        return asdict(recovered.report)

    def _note_base(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.base_model_weights = dict(weights)
        self.base_model_keys_to_extract = sorted(weights)

    def _base_of(self, provider: StateProvider) -> dict[str, torch.Tensor]:
        return {
            f"{part_id}/{name}": tensor.detach()
            for part_id, tensors in provider.parts().items()
            for name, tensor in tensors.items()
            if self._is_base(name, tensor)
        }

    def _is_base(self, name: str, tensor: torch.Tensor) -> bool:
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        is_adapter = self.is_adapter_key(name) or self.is_adapter_key((name, tensor))
        return is_parameter and not is_adapter

    def _view(self, provider: StateProvider) -> StateProvider:
        """Without the base model."""
        return PartsView(
            provider,
            lambda: {
                part_id: {n: t for n, t in tensors.items() if not self._is_base(n, t)}
                for part_id, tensors in provider.parts().items()
            },
        )


def _bare(provider: StateProvider, weights: Mapping[str, torch.Tensor]) -> PartsView:
    return PartsView(provider, lambda: {_BASE: weights}, is_bare=True)
