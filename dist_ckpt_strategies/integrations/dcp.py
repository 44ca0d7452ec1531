"""torch.distributed.checkpoint (DCP) over packs: ``save`` and ``load``, and what its verbs take.

The writer and the reader are in ``dcp_storage``. ``async_save`` and ``ShardLayout`` do without DCP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.stateful import Stateful

from dist_ckpt_strategies.comm.base import Communicator, run_and_gather, run_collectively
from dist_ckpt_strategies.comm.process_group import (
    ProcessGroup,
    global_rank,
    is_of_communication,
    run_abandonable,
)
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import Options, Verify, options_from_environment
from dist_ckpt_strategies.device import on_own_gpu
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointError,
    CoverageError,
    PeerLostError,
    PeerTimeoutError,
    PlanError,
    StorageTimeoutError,
    as_checkpoint_error,
    error_from_peer,
    kind_of,
    raises_megatron_errors,
    text_of,
)
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.integrations.dcp_storage import PackStorageReader, PackStorageWriter
from dist_ckpt_strategies.local.plan import build_distribution
from dist_ckpt_strategies.megatron.shards import message_of, object_from_message, shard_from_message
from dist_ckpt_strategies.megatron.types import ShardedObject, ShardedTensor
from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest
from dist_ckpt_strategies.sharded.checks import require_same_checkpoint
from dist_ckpt_strategies.storage.host import no_garbage_collection
from dist_ckpt_strategies.strategies.save import save_async

__all__ = [
    "PackStorageReader",
    "PackStorageWriter",
    "ShardLayout",
    "async_save",
    "load",
    "save",
    "shard_layout",
]

T = TypeVar("T")


@raises_megatron_errors
def save(  # noqa: PLR0913 - those of DCP
    state_dict: dict[str, Any],
    path: str | Path,
    *,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    options: Options | None = None,
    allow: Allowed = (),
    overwrite: bool = True,
    timeout_s: float | None = None,
) -> Metadata:
    """Save by ``torch.distributed.checkpoint.save``; every rank raises where one has failed.

    Collective over the group, but for ``no_dist``. ``timeout_s`` is the longest wait for a peer,
    and for DCP's save. After a PeerTimeoutError or PeerLostError the group is out of step, and must
    not be used again. Other arguments are those of ``PackStorageWriter`` and DCP.

    Raises:
        PlanError, UnsafeObjectError, CheckpointExistsError, StorageError: see PackStorageWriter.
        PeerError: the same on another rank; it names that rank, and the key.
        PeerTimeoutError, PeerLostError: another rank did not answer.
    """
    chosen = (options or options_from_environment()).with_changes(timeout_s=timeout_s)
    comm = _communicator(process_group, chosen, f"to {path}", "DCP save", no_dist=no_dist)
    writers: list[PackStorageWriter] = []

    def prepare() -> None:
        writers.append(PackStorageWriter(path, options=chosen, allow=allow, overwrite=overwrite))

    run_collectively(comm, prepare)  # a rank that does not come is named
    verb: Any = partial(
        dcp_save,
        state_dict,
        storage_writer=writers[0],
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )
    metadata: Metadata
    metadata = run_collectively(comm, lambda: _called(comm, verb, chosen, writers[0].discard))
    return metadata


@raises_megatron_errors
def load(  # noqa: PLR0913 - those of DCP
    state_dict: dict[str, Any],
    path: str | Path,
    *,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    options: Options | None = None,
    allow: Allowed = (),
    verify: Verify | str | None = None,
    timeout_s: float | None = None,
) -> None:
    """Load by ``torch.distributed.checkpoint.load``; every rank raises where one has failed.

    Collective over the group, but for ``no_dist``; ``timeout_s`` is as for ``save``. Other
    arguments are those of ``PackStorageReader`` and DCP.

    Raises:
        ArrayNotFoundError, PlanError: the checkpoint has not what is asked for.
        CheckpointNotFoundError, StorageError: see PackStorageReader.
        PeerError, PeerTimeoutError, PeerLostError: as ``save``.
    """
    chosen = (options or options_from_environment()).with_changes(timeout_s=timeout_s)
    comm = _communicator(process_group, chosen, f"from {path}", "DCP load", no_dist=no_dist)
    readers: list[PackStorageReader] = []

    def prepare() -> str:
        readers.append(PackStorageReader(path, options=chosen, allow=allow, verify=verify))
        return readers[0].open().identity

    require_same_checkpoint(comm, path, run_and_gather(comm, prepare))
    verb: Any = partial(
        dcp_load,
        state_dict,
        storage_reader=readers[0],
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )
    run_collectively(comm, lambda: _called(comm, verb, chosen))


@raises_megatron_errors
def async_save(
    state_dict: Mapping[str, Any],
    path: str | Path,
    *,
    allow: Allowed = (),
    overwrite: bool = True,
    timeout_s: float | None = None,
) -> LocalSaveRequest:
    """Save in the background what ``load`` reads; blocks for the copy to host memory.

    Collective over the world, as is ``wait`` of what it returns: that makes the checkpoint visible,
    or raises on every rank where one has failed. A save that still runs is waited for first.

    Raises:
        PlanError, UnsafeObjectError, CheckpointExistsError, StorageError, PeerError: as ``save``.
    """
    whole = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state_dict.items()}
    shards = shard_layout(whole, timeout_s=timeout_s).shards(whole)
    return save_async(shards, path, overwrite=overwrite, allow=allow, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Which of the shards and values in states of a training this rank saves; ``shard_layout``."""

    own: frozenset[Any]

    def shards(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A sharded state dict for ``TieredCheckpointManager``, ``save`` or ``load``. Rank-local.

        Its tensors share memory with those of the state, which a load fills.
        """
        shards = _shards_of(state)
        for value in shards.values():
            value.replica_id = int(_name_of(message_of(value)) not in self.own)
        return shards

    def restore(self, state: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
        """Put values that are no tensors into a state, of what a load has returned. Rank-local."""
        planner = _planner_of(state)
        for key, path in planner.mappings.items():
            if not isinstance(planner.state_dict[key], torch.Tensor):
                parents: Any = reduce(getitem, path[:-1], state)  # type: ignore[arg-type]
                parents[path[-1]] = loaded[key]


@raises_megatron_errors
def shard_layout(state: Mapping[str, Any], *, timeout_s: float | None = None) -> ShardLayout:
    """Find out which ranks hold what, and choose who saves it. Collective over the world.

    Raises:
        PeerError, PeerTimeoutError, PeerLostError: another rank has failed.
    """
    chosen = options_from_environment().with_changes(timeout_s=timeout_s)
    comm = open_communicator(None, timeout_s=chosen.timeout_s, purpose="shard layout")
    held = run_and_gather(comm, lambda: [message_of(one) for one in _shards_of(state).values()])
    specs = [[spec for message in one if (spec := shard_from_message(message))] for one in held]
    owners: dict[Any, int] = {**build_distribution(specs)}
    for rank, messages in enumerate(held):
        for name in map(_name_of, messages):
            owners.setdefault(name, rank)
    return ShardLayout(frozenset(name for name, rank in owners.items() if rank == comm.rank))


def _planner_of(state: Mapping[str, Any]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=True)
    return planner


def _shards_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What DCP would save of a state on this rank, with its keys; nobody is chosen yet."""
    planner, shards = _planner_of(state), {}
    for item in planner.create_local_plan().items:
        key, data, stored = item.index.fqn, planner.lookup_object(item.index), item.tensor_data
        if stored is None:
            shards[key] = ShardedObject(key, data, (1,), (0,))
            continue
        offset, size = tuple(stored.chunk.offsets), tuple(stored.chunk.sizes)
        if all(size) or not all(stored.size):
            shards[f"{key}@{offset}"] = ShardedTensor(
                key, data.detach(), data.dtype, size, tuple(stored.size), offset, None
            )
    return shards


def _name_of(message: Any) -> Any:
    spec = shard_from_message(message)
    return object_from_message(message) if spec is None else spec.id


def _communicator(
    group: ProcessGroup | None, options: Options, detail: str, purpose: str, *, no_dist: bool
) -> Communicator:
    if no_dist:
        return Communicator([global_rank()])
    return open_communicator(group, timeout_s=options.timeout_s, purpose=purpose, detail=detail)


def _called(
    comm: Communicator,
    verb: Callable[[], T],
    options: Options,
    discard: Callable[[], None] = lambda: None,
) -> T:
    """What a verb of DCP's returns; its errors as ours. ``discard``: what it has written."""

    def on_gpu() -> T:
        with on_own_gpu(), torch.no_grad():
            return verb()

    try:
        with no_garbage_collection():
            result: T = run_abandonable(on_gpu, options.timeout_s, "torch.distributed.checkpoint")
    except CheckpointException as error:
        causes = {rank: _as_error(cause) for rank, (cause, _) in error.failures.items()}
        if not any(isinstance(cause, StorageTimeoutError) for cause in causes.values()):
            discard()  # else it may yet become visible
        raise _of_ranks(comm, causes) from error
    except CheckpointError:
        raise
    except (TimeoutError, RuntimeError) as error:
        is_late = isinstance(error, TimeoutError)
        if not (is_late or is_of_communication(error)):
            raise
        found = comm.peer_error(error)
        is_late |= "imed out" in str(error)
        raise (PeerTimeoutError if is_late else PeerLostError)(found.rank, found.message) from error
    return result


_MEANINGS: Sequence[tuple[re.Pattern[str], type[CheckpointError]]] = (
    (re.compile(r"Missing key in checkpoint state_dict: (.+)\.", re.DOTALL), ArrayNotFoundError),
    (re.compile(r"Size mismatch .* for (.+)", re.DOTALL), PlanError),
    (re.compile(r".*?key:(.+?) has overlapping chunks", re.DOTALL), CoverageError),
    (re.compile(r".*?key:(.+?) invalid fill tensor-volume", re.DOTALL), CoverageError),
    (re.compile(r".*?key:(.+?) has out of bounds chunk", re.DOTALL), PlanError),
)
"""What messages of DCP's planners mean; each names a key."""


def _as_error(error: BaseException) -> CheckpointError:
    """An error of one rank, as one of ours; with the key where DCP's planners name one."""
    if isinstance(error, CheckpointError):
        return error
    text = text_of(error)
    for pattern, kind in _MEANINGS:
        if match := pattern.match(text):
            return kind(f"{match[1]}: {text}", key=match[1])
    return as_checkpoint_error(error if isinstance(error, Exception) else RuntimeError(text))


def _of_ranks(comm: Communicator, causes: Mapping[int, CheckpointError]) -> CheckpointError:
    """What this rank raises, where these ranks of the group have failed."""
    rank = comm.rank if comm.rank in causes else min(causes)
    cause, who = causes[rank], comm.global_ranks[rank]
    if rank == comm.rank:
        return cause.at_rank(who)
    return error_from_peer(who, kind_of(cause), cause.message, key=cause.key, path=cause.path)
