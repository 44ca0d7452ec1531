"""Sharded state dicts of Megatron-Core in local checkpoints."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Mapping, Sequence, ValuesView
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from dist_ckpt_strategies.comm.base import (
    Communicator,
    Message,
    run_and_gather,
    run_and_gather_bytes,
    run_collectively,
)
from dist_ckpt_strategies.comm.exchange import Blocks, Incoming, Outgoing, exchange
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, ShardId, ShardSpec
from dist_ckpt_strategies.device import TensorBytes, require_plain, torch_dtype
from dist_ckpt_strategies.errors import ArrayNotFoundError, PlanError, StrategyError
from dist_ckpt_strategies.local.plan import ShardSlice, build_distribution, build_reshard_plan
from dist_ckpt_strategies.local.state_dicts import ListedTensors
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    digest_of,
    mapped_values,
    merged,
    message_of,
    needs_stored_keys,
    object_from_message,
    object_id,
    parsed_strict,
    shard_data,
    shard_from_message,
    shard_spec,
    sharded_values,
    split_for_load,
    split_for_save,
    value_from_message,
)
from dist_ckpt_strategies.megatron.types import (
    ShardedObject,
    ShardedTensor,
    StrictHandling,
    raises_megatron_errors,
)
from dist_ckpt_strategies.sharded.checks import check_load, check_save
from dist_ckpt_strategies.sharded.load import (
    Conversions,
    ReadItem,
    destination,
    matched,
    require_fillable,
    warn_of_conversions,
)

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
        """What is pickled: the sharded values as one text, which takes a fraction of the time."""
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
        known = cached_metadata if is_unchanged else None
        state, found = cls.distributed(group, common, sharded, known)
        return state, replace(found, sharding=sharding)

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
        everyone: list[Any] = []
        if distribution is None:
            everyone = run_and_gather(
                comm, lambda: [message_of(v) for v in values if isinstance(v, ShardedTensor)]
            )

        def split() -> tuple[MCoreTensorAwareStateDict, ShardDistribution]:
            held = map(_tensor_specs, everyone)
            found = distribution or ShardDistribution(build_distribution(list(held)))

            def keep(value: Any) -> Any:
                if not isinstance(value, ShardedTensor):
                    return value
                rank = found.main_rank_for_shard[shard_spec(value).id]
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
            DTypeMismatchError: one was saved in another dtype, and ``strict_dtype`` is set; else it
                is converted, with one warning.
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
        """See ``to_state_dict`` and ``loaded``; with missing and unexpected keys. Collective."""
        comm = _communicator(None, "making of a state dict")
        begun: list[tuple[StateDict, ...]] = []
        options: list[Options] = []

        def begin() -> bool:
            found = options_from_environment()
            options.append(found.with_changes(strict_dtype=strict_dtype or found.strict_dtype))
            _require_algorithm(algo)
            self.require_tensors()
            wanted = {} if sharded_state_dict is None else sharded_state_dict
            state = mapped_values(lambda value: value, self.common_state_dict)
            begun.append((state, *split_for_load(mapped_values(copy.copy, wanted))))
            return bool(wanted)

        is_any_wanted = any(run_and_gather(comm, begin))
        ((state, sharded, nonpersistent, factories),) = begun
        if not is_any_wanted:
            return state, set(), set()
        strictness = run_collectively(comm, lambda: parsed_strict(strict))
        stored = _stored_keys(comm, self._bare) if needs_stored_keys(strictness) else {}
        outcome = check_load(comm, sharded, strictness, lambda: stored, validate_access_integrity)
        loaded = self.loaded(comm, outcome.sharded, options[0], fills=fills)
        run_collectively(comm, lambda: merged(state, nonpersistent, loaded, factories=factories))
        return state, outcome.missing, outcome.unexpected

    @property
    def sharded_state_dict(self) -> StateDict:
        """The ShardedTensors and ShardedObjects, new ones each time; without data if hollow."""
        tensors = None if self.is_hollow else self.require_tensors()

        def give(number: int) -> Any:
            value = self._bare[number]
            if isinstance(value, ShardedTensor) and value.data is not None:
                value = copy.copy(value)
                value.data = None if tensors is None else tensors[value.data]
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

    def loaded(
        self,
        comm: Communicator,
        wanted: StateDict,
        options: Options,
        *,
        fills: bool,
        name: object = "a local checkpoint",
    ) -> StateDict:
        """The wanted ShardedTensors and ShardedObjects replaced by tensors and objects.

        Collective. What this rank does not hold comes from the ranks that do; errors are those of
        ``to_state_dict``. With ``fills`` the data of ShardedTensors is filled, once all ranks know
        that it can be. Warnings call the checkpoint ``name``.
        """
        held: dict[Any, Any] = {}
        own: list[Any] = []

        def describe() -> list[Any]:
            for value in sharded_values(self.sharded_state_dict):
                if isinstance(value, ShardedObject):
                    held[object_id(value)] = value.data
                elif value.data is not None:
                    require_plain(value.data, key=value.key)
                    spec = shard_spec(value)
                    held[spec.id] = value.data.detach().reshape(spec.region.shape)
                    own.append(message_of(value))
            return [message_of(v) for v in sharded_values(wanted) if _id_of(v) not in held]

        missing = run_and_gather(comm, describe)
        found = held | _retrieved_objects(comm, held, missing)
        is_any_missing = any(map(_tensor_specs, missing))
        everyone = run_and_gather(comm, lambda: own) if is_any_missing else [own]
        shards = list(map(_tensor_specs, everyone))
        reads, converted, lacking = _matched(comm, held, shards, wanted, options, fills=fills)
        if any(lacking):
            found |= _retrieved(comm, held, shards, lacking, options.max_inflight_bytes)

        def give(value: Any) -> Any:
            if isinstance(value, ShardedObject):
                return found[object_id(value)]
            return _given(value, reads[id(value)], found, fills=fills)

        given = run_collectively(comm, lambda: mapped_values(give, wanted))
        warn_of_conversions(comm, name, converted)
        return given


def _given(
    tensor: Any, read: ReadItem, found: Mapping[Any, torch.Tensor], *, fills: bool
) -> torch.Tensor:
    """The result for a ShardedTensor: what was found, zeros where nothing is stored."""
    loaded = None if read.source is None else found[ShardId(tensor.key, read.source)]
    if not (fills or loaded is None or read.is_padded):
        dtype = tensor.dtype if tensor.data is None else tensor.data.dtype
        return loaded.reshape(tuple(tensor.local_shape)).to(dtype)
    target = destination(tensor if fills else tensor.without_data())
    view = target.detach()[(None,) * tensor.prepend_axis_num]
    if read.is_padded:
        view.zero_()
    if loaded is not None:
        view[... if read.target is None else read.target.slices()].copy_(loaded)
    return target


def _id_of(value: Any) -> ObjectId | ShardId:
    return object_id(value) if isinstance(value, ShardedObject) else shard_spec(value).id


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

    everyone = run_and_gather(comm, describe)
    found = (value_from_message(one) for messages in everyone for one in messages)
    return {name(value): value for value in found}


def _tensor_specs(messages: Sequence[Any]) -> list[ShardSpec]:
    """The specs of the ShardedTensors among what ``message_of`` described."""
    specs = map(shard_from_message, messages)
    return [spec for spec in specs if spec is not None]


def _matched(
    comm: Communicator,
    held: Mapping[Any, Any],
    shards: Sequence[Sequence[ShardSpec]],
    wanted: StateDict,
    options: Options,
    *,
    fills: bool,
) -> tuple[dict[int, ReadItem], list[Conversions], list[list[ShardSpec]]]:
    """How ShardedTensors are filled, by ``id``; what each rank converts, and lacks. Collective.

    ``held`` is what this rank has, ``shards`` what each rank has.
    """
    tensors = [value for value in sharded_values(wanted) if isinstance(value, ShardedTensor)]
    stored = {
        spec.key: ArraySpec(spec.key, spec.array_shape, spec.dtype, spec.array_shape)
        for spec in chain.from_iterable(shards)
    }
    reads: dict[int, ReadItem] = {}

    def match() -> Message:
        there = [tensor for tensor in tensors if tensor.key in stored]
        specs = map(shard_spec, there)
        items, converted = matched(there, specs, stored, is_strict=options.strict_dtype)
        reads.update(zip(map(id, there), items, strict=True))
        if fills:
            require_fillable(tensors)
        lacking = [message_of(tensor) for tensor in tensors if tensor.key not in stored]
        for array, source in ((read.array, read.source) for read in items):
            if source is not None and (array.key, source) not in held:  # as message_of has it
                where = [array.key, array.shape, source.offset, 0, array.dtype.value]
                lacking.append([*where, source.shape, None, 0, False])
        return [converted, lacking]

    converted, lacking = zip(*run_and_gather(comm, match), strict=True)
    return reads, list(converted), list(map(_tensor_specs, lacking))


def _retrieved(
    comm: Communicator,
    held: Mapping[Any, Any],
    shards: Sequence[Sequence[ShardSpec]],
    wanted: Sequence[Sequence[ShardSpec]],
    max_inflight_nbytes: int,
) -> dict[Any, torch.Tensor]:
    """The regions that this rank lacks, from the ranks that hold them. Collective.

    ``held`` is what this rank has, ``shards`` what each rank has, ``wanted`` what each lacks.
    """
    found: dict[Any, torch.Tensor] = {}

    def prepare() -> Blocks:
        slices = build_reshard_plan(shards, wanted)
        first = next(iter(shards[comm.rank]), None)
        device = torch.device("cpu") if first is None else held[first.id].device
        for spec in wanted[comm.rank]:
            dtype = torch_dtype(spec.dtype)
            found[spec.id] = torch.empty(spec.region.shape, dtype=dtype, device=device)
        outgoing, incoming = [], []
        for one in slices:
            key = one.target.key
            if one.sender == comm.rank:
                source = TensorBytes([_part(one, one.source, held)])
                outgoing.append(Outgoing.of(key, one.receiver, source))
            if one.receiver == comm.rank:
                target = TensorBytes([_part(one, one.target, found)])
                incoming.append(Incoming.of(key, one.sender, target, comm.device, key))
        return outgoing, incoming

    exchange(comm, prepare, max_inflight_nbytes=max_inflight_nbytes)
    return found


def _retrieved_objects(
    comm: Communicator, held: Mapping[Any, Any], missing: Sequence[Sequence[Any]]
) -> dict[Any, Any]:
    """Objects that some rank lacks, from the first rank that holds them. Collective."""
    wanted = {
        object_from_message(message): rank
        for rank, messages in reversed(list(enumerate(missing)))
        for message in messages
        if shard_from_message(message) is None
    }
    if not wanted:
        return {}
    contents = run_and_gather_bytes(
        comm, lambda: pickle.dumps({name: held[name] for name in wanted if name in held})
    )

    def take() -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for content in reversed(contents):
            found.update(pickle.loads(content))  # noqa: S301 - of a rank of this job
        for name in sorted(wanted.keys() - found.keys()):
            raise ArrayNotFoundError(
                f"{name.unique_key}: rank {comm.global_ranks[wanted[name]]} wants this object, "
                "which no local shard of the checkpoint holds",
                key=name.key,
            )
        return found

    return run_collectively(comm, take)


def _part(one: ShardSlice, shard: ShardId, tensors: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    """The elements of a slice, as a view of the tensor of a shard."""
    return tensors[shard].detach()[one.region.within(shard.region).slices()]
