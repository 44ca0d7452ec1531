"""Sharded state dicts of Megatron-Core in local checkpoints."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence, ValuesView
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from dist_ckpt_strategies.comm.base import Communicator, run_and_gather, run_collectively
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.core.array import ShardId
from dist_ckpt_strategies.errors import PlanError, StrategyError
from dist_ckpt_strategies.local.plan import build_distribution
from dist_ckpt_strategies.local.reshard import resharded, tensor_specs
from dist_ckpt_strategies.local.state_dicts import ListedTensors
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    digest_of,
    mapped_values,
    merged,
    message_of,
    parsed_strict,
    shard_data,
    shard_spec,
    sharded_values,
    split_for_load,
    split_for_save,
    value_from_message,
)
from dist_ckpt_strategies.megatron.types import (
    ShardedTensor,
    StrictHandling,
    raises_megatron_errors,
)
from dist_ckpt_strategies.sharded.checks import check_load, check_save

_ALGORITHMS = ("atomic", "fully_parallel")


@dataclass(frozen=True, slots=True)
class ShardDistribution:
    """The main rank of each shard, within a group, for one sharding.

    Attributes:
        main_rank_for_shard: the rank of the group that keeps each shard.
        sharding: digest of what all ranks held.
    """

    main_rank_for_shard: Mapping[ShardId, int]
    sharding: str = ""


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
        self._bare: list[Any] = []  # a ShardedTensor has the number of its tensor as data

        def take(value: Any) -> int:
            if isinstance(value, ShardedTensor) and value.data is not None:
                shard_data(value)  # raises where it is not what the ShardedTensor says
                tensor, value = value.data.detach(), value.without_data()
                value.data = len(tensors)
                tensors[f"{value.key} ({value.data})"] = tensor
            self._bare.append(value)
            return len(self._bare) - 1

        self._numbers = mapped_values(take, sharded)
        self._hold(tensors)
        self.common_state_dict = common

    def __getstate__(self) -> dict[str, Any]:
        """The pickled form: the sharded values as one text, which takes a fraction of the time."""
        text, data = json.dumps(list(map(message_of, self._bare))), [v.data for v in self._bare]
        return {**super().__getstate__(), "_bare": (text, data)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what ``__getstate__`` gave."""
        text, data = state["_bare"]
        bare = list(map(value_from_message, json.loads(text)))
        for value, held in zip(bare, data, strict=True):
            value.data = held
        vars(self).update(state, _bare=bare)

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

        Collective over the world, and over the group. With ``cached_metadata``, Megatron-Core's
        checks of the sharding and the choice of main ranks are left out as long as the sharding is
        the same on all ranks. The caller's state dict is left as it is.

        Args:
            sharded_state_dict: as for ``dist_checkpointing.save``.
            algo: ``"atomic"`` keeps all shards on every rank; ``"fully_parallel"`` lets one of
                the ranks of the group that hold a shard keep it.
            parallelization_group: the ranks that distribute them; the world by default.
            cached_metadata: what an earlier call with the same group returned.

        Raises:
            PlanError: the algorithm is unknown, or the shards of all ranks do not fit together.
        """
        world = _communicator(None, "split of a state dict")
        made: list[tuple[StateDict, StateDict, MCoreTensorAwareStateDict]] = []

        def split() -> list[str | None]:
            options_from_environment()
            _require_algorithm(algo)
            sharded, common = split_for_save(sharded_state_dict, None)
            own = digest_of([message_of(value) for value in sharded_values(sharded)])
            made.append((common, sharded, cls(common, sharded)))
            return [own, cached_metadata.sharding if cached_metadata else None]

        owns, lasts = zip(*run_and_gather(world, split), strict=True)
        ((common, sharded, whole),) = made
        sharding = digest_of(owns)
        is_unchanged = all(last == sharding for last in lasts)
        if not is_unchanged:
            check_save(world, sharded, common)
        if algo == "atomic":
            return whole, None
        group = _communicator(parallelization_group, "distribution of shards")
        before = cached_metadata if is_unchanged else None
        state, distribution = cls.distributed(group, common, sharded, before)
        return state, replace(distribution, sharding=sharding)

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

        def describe() -> list[Any]:
            return [message_of(v) for v in sharded_values(sharded) if isinstance(v, ShardedTensor)]

        known = distribution
        if known is None:
            held = list(map(tensor_specs, run_and_gather(comm, describe)))
            known = ShardDistribution(build_distribution(held))
        main_ranks = known.main_rank_for_shard

        def keep(value: Any) -> Any:
            is_own = (
                not isinstance(value, ShardedTensor)
                or main_ranks[shard_spec(value).id] == comm.rank
            )
            return value if is_own else value.without_data()

        return run_collectively(comm, lambda: cls(common, mapped_values(keep, sharded))), known

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
            validate_access_integrity: also check that what ranks want makes up the arrays.
            parallelization_group: see ``algo``.
            strict: what to do about keys that only one side has.
            return_mismatch_keys: return missing and unexpected keys, too.

        Raises:
            CoverageError: no rank holds a part of something that is wanted.
            PlanError: an array was saved with another shape; or in another dtype, and
                ``strict_dtype`` is set: else it is converted, with one warning.
            ArrayNotFoundError: no rank holds an object that is wanted.
        """
        del exchange_algo, parallelization_group
        found = self._in_layout_of(
            sharded_state_dict,
            strict,
            algo=algo,
            validate_access_integrity=validate_access_integrity,
        )
        return found if return_mismatch_keys else found[0]

    @raises_megatron_errors
    def load_into(self, sharded_state_dict: StateDict, **how: Any) -> Any:
        """Like ``load`` of a global checkpoint: tensors that have data are filled. Collective.

        ``how``: its arguments ``strict``, ``validate_access_integrity`` and ``strict_dtype``.
        """
        found = self._in_layout_of(sharded_state_dict, fills=True, **how)
        strict = parsed_strict(how.get("strict", StrictHandling.ASSUME_OK_UNEXPECTED))
        return found if StrictHandling.requires_returning_mismatch_keys(strict) else found[0]

    def _in_layout_of(
        self,
        sharded_state_dict: StateDict | None,
        strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
        *,
        algo: str = "atomic",
        validate_access_integrity: bool = True,
        strict_dtype: bool = False,
        fills: bool = False,
    ) -> tuple[StateDict, set[str], set[str]]:
        """See ``to_state_dict`` and ``load_into``; with missing and unexpected keys. Collective."""
        comm = _communicator(None, "making of a state dict")
        begun: list[tuple[Any, ...]] = []

        def begin() -> bool:
            options = options_from_environment()
            options = options.with_changes(strict_dtype=strict_dtype or options.strict_dtype)
            _require_algorithm(algo)
            self.require_tensors()
            wanted = {} if sharded_state_dict is None else sharded_state_dict
            state = mapped_values(lambda value: value, self.common_state_dict)
            split = split_for_load(mapped_values(copy.copy, wanted))
            begun.append((options, parsed_strict(strict), state, *split))
            return bool(wanted)

        is_any_wanted = any(run_and_gather(comm, begin))
        ((options, strictness, state, sharded, nonpersistent, factories),) = begun
        if not is_any_wanted:
            return state, set(), set()
        needs_stored = StrictHandling.requires_explicit_ckpt_mismatch_check(strictness)
        stored = _stored_keys(comm, self._bare) if needs_stored else {}
        outcome = check_load(comm, sharded, strictness, lambda: stored, validate_access_integrity)
        wanted, missing, unexpected = outcome
        loaded = resharded(comm, self.sharded_state_dict, wanted, options, fills=fills)
        run_collectively(comm, lambda: merged(state, nonpersistent, loaded, factories=factories))
        return state, missing, unexpected

    @property
    def sharded_state_dict(self) -> StateDict:
        """The ShardedTensors and ShardedObjects, new ones each time; without data if hollow."""

        def give(number: int) -> Any:
            value = self._bare[number]
            if isinstance(value, ShardedTensor) and value.data is not None:
                value = copy.copy(value)
                value.data = None if self.is_hollow else self.require_tensors()[value.data]
            return value

        return mapped_values(give, self._numbers)

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


def _communicator(group: ProcessGroup | None, purpose: str) -> Communicator:
    """The ranks of a group. Options that are invalid here are reported by the first collective."""
    try:
        timeout_s = options_from_environment().timeout_s
    except StrategyError:
        timeout_s = Options().timeout_s
    return open_communicator(group, timeout_s=timeout_s, purpose=purpose)


def _require_algorithm(algo: str) -> None:
    if algo not in _ALGORITHMS:
        raise PlanError(f"algo: expected one of {', '.join(_ALGORITHMS)}, found {algo!r}")


def _stored_keys(comm: Communicator, values: Sequence[Any]) -> StateDict:
    """A sharded value, without data, for each array and shard of an object. Collective."""

    def name(value: Any) -> str:
        return str(value.key if isinstance(value, ShardedTensor) else value.unique_key)

    def describe() -> list[Any]:
        first = {name(value): value for value in reversed(values)}
        return [message_of(value) for value in first.values()]

    stored = map(value_from_message, chain.from_iterable(run_and_gather(comm, describe)))
    return {name(value): value for value in stored}
