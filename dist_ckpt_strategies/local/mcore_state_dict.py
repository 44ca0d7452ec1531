"""Sharded state dicts of Megatron-Core in local checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any

import torch

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.collective import run_and_gather, run_collectively
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.core.array import ObjectId, ShardId
from dist_ckpt_strategies.errors import PlanError, StrategyError
from dist_ckpt_strategies.local.plan import build_distribution
from dist_ckpt_strategies.local.reshard import (
    retrieved,
    stored_keys,
    tensor_specs,
)
from dist_ckpt_strategies.local.state_dicts import ListedTensors, TensorPlace
from dist_ckpt_strategies.megatron.shards import (
    LoadParts,
    SaveParts,
    StateDict,
    mapped_values,
    merge_factories,
    merged,
    message_of,
    needs_stored_keys,
    object_id,
    parsed_strict,
    shard_spec,
    sharded_values,
    split_for_load,
    split_for_save,
)
from dist_ckpt_strategies.megatron.types import (
    ShardedObject,
    ShardedTensor,
    StrictHandling,
    raises_megatron_errors,
)
from dist_ckpt_strategies.sharded.checks import check_load, check_save
from dist_ckpt_strategies.sharded.load import destination

_ALGORITHMS = ("atomic", "fully_parallel")


@dataclass(frozen=True, slots=True)
class ShardDistribution:
    """The main rank of each shard, within a group; valid as long as the sharding is the same."""

    main_rank_for_shard: Mapping[ShardId, int]


class MCoreTensorAwareStateDict(ListedTensors):
    """A sharded state dict: ShardedTensors and ShardedObjects, and the common state beside them.

    Made by ``from_state_dict``; what was loaded becomes a state dict again by ``to_state_dict``,
    in the parallel layout that it was saved in or in another one.

    Args:
        common: what every rank holds alike.
        sharded: nested dict of ShardedTensors and ShardedObjects; a tensor without data is one
            that another rank keeps.
    """

    def __init__(self, common: StateDict, sharded: StateDict) -> None:
        tensors: dict[str, torch.Tensor] = {}

        def take(value: Any) -> Any:
            if not (isinstance(value, ShardedTensor) and value.data is not None):
                return value
            bare = value.without_data()
            bare.data = TensorPlace(len(tensors))
            tensors[f"{value.key} ({len(tensors)})"] = value.data.detach()
            return bare

        self._hollow = mapped_values(take, sharded)
        self._hold(tensors)
        self.common_state_dict = common

    @classmethod
    @raises_megatron_errors
    def from_state_dict(
        cls,
        sharded_state_dict: StateDict,
        algo: str = "fully_parallel",
        parallelization_group: ProcessGroup | None = None,
        cached_metadata: ShardDistribution | None = None,
    ) -> tuple[MCoreTensorAwareStateDict, ShardDistribution | None]:
        """The state, and how its shards are distributed, for the next call.

        Collective over the world, and over the group. Without ``cached_metadata`` Megatron-Core's
        checks of the sharding are run. The caller's state dict is left as it is.

        Args:
            sharded_state_dict: as for ``dist_checkpointing.save``.
            algo: ``"atomic"`` keeps all shards on every rank; ``"fully_parallel"`` lets one of
                the ranks of the group that hold a shard keep it.
            parallelization_group: the ranks that distribute them; the world by default.
            cached_metadata: what an earlier call returned, if the sharding has not changed.

        Raises:
            PlanError: the algorithm is unknown, or the shards of all ranks do not fit together.
        """
        world = _communicator(None, "split of a state dict")

        def split() -> tuple[SaveParts, MCoreTensorAwareStateDict]:
            options_from_environment()
            _require_algorithm(algo)
            parts = split_for_save(sharded_state_dict, None)
            return parts, cls(parts.common, parts.sharded)

        parts, whole = run_collectively(world, split)
        if cached_metadata is None:
            check_save(world, parts.sharded, parts.common)
        if algo == "atomic":
            return whole, None
        group = _communicator(parallelization_group, "distribution of shards")
        return cls.distributed(group, parts.common, parts.sharded, cached_metadata)

    @classmethod
    def distributed(
        cls,
        comm: Communicator,
        common: StateDict,
        sharded: StateDict,
        distribution: ShardDistribution | None = None,
    ) -> tuple[MCoreTensorAwareStateDict, ShardDistribution]:
        """A state that has each shard on one of the ranks that hold it. Collective.

        ``common`` is what every rank holds alike. Without ``distribution`` the main rank of each
        shard is chosen.
        """
        values = sharded_values(sharded)
        everyone = (
            run_and_gather(
                comm, lambda: [message_of(v) for v in values if isinstance(v, ShardedTensor)]
            )
            if distribution is None
            else []
        )

        def split() -> tuple[MCoreTensorAwareStateDict, ShardDistribution]:
            found = distribution or _distribution(everyone)

            def keep(value: Any) -> Any:
                if not isinstance(value, ShardedTensor):
                    return value
                rank = found.main_rank_for_shard.get(shard_spec(value).id)
                if rank is None:
                    raise PlanError(
                        f"{value.key}: cached_metadata does not know this shard; leave it out "
                        "after the sharding has changed",
                        key=value.key,
                    )
                return value if rank == comm.rank else value.without_data()

            return cls(common, mapped_values(keep, sharded)), found

        return run_collectively(comm, split)

    @raises_megatron_errors
    def to_state_dict(  # noqa: PLR0913, PLR0917 - Megatron's signature
        self,
        sharded_state_dict: StateDict | None,
        algo: str = "atomic",
        exchange_algo: str = "broadcast",
        validate_access_integrity: bool = True,  # noqa: FBT001, FBT002
        parallelization_group: ProcessGroup | None = None,
        strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
        return_mismatch_keys: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """The state dict that a training script loads, in the layout of ``sharded_state_dict``.

        Collective over the world. What this rank does not hold comes from the ranks that do,
        whatever the layout was at the save. Takes memory for that, and ``max_inflight_bytes`` at
        most for what travels.

        Args:
            sharded_state_dict: what is wanted; left as it is. Empty or None on every rank gives
                the common state.
            algo: accepted for Megatron's sake: what is missing is looked for on all ranks in any
                case. So are ``exchange_algo`` and ``parallelization_group``.
            exchange_algo: see ``algo``.
            validate_access_integrity: also run Megatron-Core's checks of what is wanted.
            parallelization_group: see ``algo``.
            strict: what to do about keys that only one side has.
            return_mismatch_keys: return missing and unexpected keys, too.

        Raises:
            CoverageError: no rank holds a part of something that is wanted.
            ShapeMismatchError: an array was saved with another shape.
            ArrayNotFoundError: no rank holds an object that is wanted.
        """
        del exchange_algo, parallelization_group
        found = self._in_layout_of(
            sharded_state_dict,
            strict,
            algo=algo,
            validates=validate_access_integrity,
            deliver=lambda _, tensor: tensor,
        )
        return found if return_mismatch_keys else found[0]

    @raises_megatron_errors
    def load_into(self, sharded_state_dict: StateDict) -> StateDict:
        """Like ``to_state_dict``; tensors of ``sharded_state_dict`` that have data are filled."""
        return self._in_layout_of(sharded_state_dict, deliver=filled)[0]

    def _in_layout_of(
        self,
        sharded_state_dict: StateDict | None,
        strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
        *,
        deliver: Callable[[Any, torch.Tensor], torch.Tensor],
        algo: str = "atomic",
        validates: bool = True,
    ) -> tuple[StateDict, set[str], set[str]]:
        """See ``to_state_dict`` and ``loaded``; with missing and unexpected keys. Collective."""
        comm = _communicator(None, "making of a state dict")
        begun: list[tuple[StateDict, LoadParts]] = []

        def begin() -> bool:
            options_from_environment()
            _require_algorithm(algo)
            self.require_tensors()
            wanted = {} if sharded_state_dict is None else sharded_state_dict
            parts = split_for_load(mapped_values(copy.copy, wanted))
            begun.append((mapped_values(lambda value: value, self.common_state_dict), parts))
            return bool(wanted)

        is_any_wanted = any(run_and_gather(comm, begin))
        ((state, parts),) = begun
        if not is_any_wanted:
            return state, set(), set()
        strictness = run_collectively(comm, lambda: parsed_strict(strict))
        stored = stored_keys(comm, self._hollow) if needs_stored_keys(strictness) else {}
        outcome = check_load(comm, parts.sharded, strictness, lambda: stored, validates)
        loaded = self.loaded(comm, outcome.sharded, deliver)
        run_collectively(
            comm,
            lambda: merge_factories(merged(state, parts.nonpersistent, loaded), parts.factories),
        )
        return state, outcome.missing, outcome.unexpected

    @property
    def sharded_state_dict(self) -> StateDict:
        """The ShardedTensors and ShardedObjects, new ones each time; without data if hollow."""
        tensors = None if self.is_hollow else self.require_tensors()

        def give(value: Any) -> Any:
            if not isinstance(value, ShardedTensor) or value.data is None:
                return value
            full = copy.copy(value)
            full.data = None if tensors is None else tensors[value.data]
            return full

        return mapped_values(give, self._hollow)

    @property
    def state_dict(self) -> StateDict:
        """The common state, with the sharded values in their places."""
        self.require_tensors()
        return self._merged()

    def values(self) -> ValuesView[Any]:
        """The values of the state dict's first level; of a hollow state too, without tensors."""
        return self._merged().values()

    def _merged(self) -> StateDict:
        return merged(
            mapped_values(lambda value: value, self.common_state_dict), self.sharded_state_dict
        )

    def loaded(
        self,
        comm: Communicator,
        wanted: StateDict,
        deliver: Callable[[Any, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor,
    ) -> StateDict:
        """The wanted ShardedTensors and ShardedObjects replaced by tensors and objects.

        Collective. What this rank does not hold comes from the ranks that do; errors are those of
        ``to_state_dict``. ``deliver`` turns a ShardedTensor and what was loaded for it into the
        result.
        """
        held: dict[Any, Any] = {}
        own: list[Any] = []

        def describe() -> list[Any]:
            for value in sharded_values(self.sharded_state_dict):
                if isinstance(value, ShardedObject):
                    held[object_id(value)] = value.data
                elif value.data is not None:
                    spec = shard_spec(value)
                    held[spec.id] = value.data.detach().reshape(spec.region.shape)
                    own.append(message_of(value))
            return [message_of(v) for v in sharded_values(wanted) if _id_of(v) not in held]

        found = held | retrieved(comm, held, own, run_and_gather(comm, describe))

        def give(value: Any) -> Any:
            loaded = found[_id_of(value)]
            if isinstance(value, ShardedObject):
                return loaded
            return deliver(value, loaded.reshape(tuple(value.local_shape)))

        return run_collectively(comm, lambda: mapped_values(give, wanted))


def filled(tensor: Any, loaded: torch.Tensor) -> torch.Tensor:
    """The ShardedTensor's own data, or a new tensor, filled with what was loaded."""
    target = destination(tensor)
    target.detach().copy_(loaded)
    return target


def _id_of(value: Any) -> ObjectId | ShardId:
    return object_id(value) if isinstance(value, ShardedObject) else shard_spec(value).id


def _communicator(group: ProcessGroup | None, purpose: str) -> Communicator:
    """The ranks of a group. Options that this one cannot make are for a step of all to raise."""
    try:
        limit_s = options_from_environment().timeout_s
    except StrategyError:
        limit_s = Options().timeout_s
    return open_communicator(group, timeout_s=limit_s, purpose=purpose)


def _require_algorithm(algo: str) -> None:
    if algo not in _ALGORITHMS:
        raise PlanError(f"algo: expected one of {', '.join(_ALGORITHMS)}, found {algo!r}")


def _distribution(everyone: Sequence[Sequence[Any]]) -> ShardDistribution:
    """The main rank of each shard in a group, given what each rank holds."""
    holders: dict[ShardId, set[int]] = {}
    nbytes: dict[ShardId, int] = {}
    for rank, messages in enumerate(everyone):
        for spec in tensor_specs(messages):
            nbytes[spec.id] = spec.nbytes
            holders.setdefault(spec.id, set()).add(rank)
    return ShardDistribution(build_distribution(holders, nbytes))
