"""torch.distributed.checkpoint (DCP) over packs: ``save`` and ``load``, and what its verbs take.

The writer is in ``dcp_writer``, the reader in ``dcp_storage``; ``async_save``, ``compare`` and
``shard_layout``, which do without DCP and alone need Megatron-Core, in ``dcp_layout``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.stateful import Stateful

from dist_ckpt_strategies.comm.abort import run_abandonable
from dist_ckpt_strategies.comm.base import Communicator, run_and_gather, run_collectively
from dist_ckpt_strategies.comm.process_group import ProcessGroup, global_rank, is_of_communication
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
    array_not_found,
    as_checkpoint_error,
    error_from_peer,
    kind_of,
    raises_megatron_errors,
    text_of,
)
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.integrations.dcp_storage import (
    PackStorageReader,
    plain_state,
    put_back,
    with_text_keys,
)
from dist_ckpt_strategies.integrations.dcp_writer import PackStorageWriter
from dist_ckpt_strategies.sharded.agreement import require_same_checkpoint
from dist_ckpt_strategies.storage.host import no_garbage_collection

if TYPE_CHECKING:
    from dist_ckpt_strategies.integrations.dcp_layout import (
        ShardLayout,
        async_save,
        compare,
        shard_layout,
    )

__all__ = [
    "PackStorageReader",
    "PackStorageWriter",
    "ShardLayout",
    "async_save",
    "compare",
    "load",
    "save",
    "shard_layout",
]

T = TypeVar("T")


def __getattr__(name: str) -> Any:
    """Import what needs Megatron-Core the first time it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}_layout"), name)


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
    storage_writer: PackStorageWriter | None = None,
) -> Metadata:
    """Save by ``torch.distributed.checkpoint.save``; every rank raises where one has failed.

    Collective over the group, but for ``no_dist``. ``timeout_s`` is the longest wait for a peer,
    and for DCP's save. After a PeerTimeoutError or PeerLostError the group is out of step, and must
    not be used again. With one ``storage_writer`` for all saves, each is compared with the one
    before; its ``options``, ``allow`` and ``overwrite`` count then. Other arguments are those of
    ``PackStorageWriter`` and DCP.

    Raises:
        PlanError, UnsafeObjectError, CheckpointExistsError, StorageError: see PackStorageWriter.
        PeerError: the same on another rank; it names that rank, and the key.
        PeerTimeoutError, PeerLostError: another rank did not answer.
    """
    chosen = (options or options_from_environment()).with_changes(timeout_s=timeout_s)
    comm = _communicator(process_group, chosen, f"to {path}", "DCP save", no_dist=no_dist)

    def prepare() -> tuple[PackStorageWriter, dict[str, Any]]:
        how: Any = {"options": chosen, "allow": allow, "overwrite": overwrite}
        writer = storage_writer or PackStorageWriter(path, **how)
        writer.reset(path)
        # In DCP's save a rank that raises here leaves its peers.
        return writer, _called(comm, partial(plain_state, state_dict), chosen)

    writer, plain = run_collectively(comm, prepare)  # a rank that does not come is named
    how: Any = {"planner": planner, "process_group": process_group, "no_dist": no_dist}
    verb: Any = partial(dcp_save, plain, storage_writer=writer, **how)
    metadata: Metadata = run_collectively(comm, lambda: _called(comm, verb, chosen, writer.discard))
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
    readers, own, plain = list[PackStorageReader](), dict[str, Any](), dict[str, Any]()

    def prepare() -> str:
        readers.append(PackStorageReader(path, options=chosen, allow=allow, verify=verify))
        own.update(_called(comm, partial(plain_state, state_dict), chosen))  # as in ``save``
        plain.update(with_text_keys(own))
        return readers[0].open().identity

    require_same_checkpoint(comm, path, run_and_gather(comm, prepare))
    how: Any = {"planner": planner, "process_group": process_group, "no_dist": no_dist}

    def load_all() -> None:
        dcp_load(plain, storage_reader=readers[0], **how)
        put_back(own, plain)
        for key in sorted(own):
            if isinstance(stateful := state_dict[key], Stateful):
                stateful.load_state_dict(own[key])
            else:
                state_dict[key] = own[key]

    run_collectively(comm, lambda: _called(comm, load_all, chosen, reader=readers[0]))


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
    reader: PackStorageReader | None = None,
) -> T:
    """The result of a function of DCP, its errors as ours; ``discard`` deletes what it wrote.

    ``reader`` is that of a load: errors say where it reads, and what is there.
    """

    def on_gpu() -> T:
        with on_own_gpu(), torch.no_grad():
            return verb()

    try:
        with no_garbage_collection():
            result: T = run_abandonable(on_gpu, options.timeout_s, "torch.distributed.checkpoint")
    except CheckpointException as error:
        causes = {rank: _as_error(cause, reader) for rank, (cause, _) in error.failures.items()}
        if not any(isinstance(cause, StorageTimeoutError) for cause in causes.values()):
            discard()  # else it may yet become visible
        raise _of_ranks(comm, causes) from error
    except CheckpointError:
        raise
    except (TimeoutError, RuntimeError) as error:
        is_late = isinstance(error, TimeoutError)
        if not (is_late or is_of_communication(error)):
            raise
        peer = comm.peer_error(error)
        is_late |= "imed out" in str(error)
        raise (PeerTimeoutError if is_late else PeerLostError)(peer.rank, peer.message) from error
    return result


_MEANINGS: Sequence[tuple[re.Pattern[str], type[CheckpointError]]] = (
    (re.compile(r"Missing key in checkpoint state_dict: (.+)\.", re.DOTALL), ArrayNotFoundError),
    (re.compile(r"Size mismatch .* for (.+)", re.DOTALL), PlanError),
    (re.compile(r"Invalid checkpoint metadata for (.+), expected ", re.DOTALL), PlanError),
    (re.compile(r".*?key:(.+?) has overlapping chunks", re.DOTALL), CoverageError),
    (re.compile(r".*?key:(.+?) invalid fill tensor-volume", re.DOTALL), CoverageError),
    (re.compile(r".*?key:(.+?) has out of bounds chunk", re.DOTALL), PlanError),
)
"""Meanings of messages of DCP's planners; each names a key."""


def _as_error(error: BaseException, reader: PackStorageReader | None) -> CheckpointError:
    """An error of one rank, as one of ours; with key and place where DCP's planners name a key."""
    if isinstance(error, CheckpointError):
        return error
    text = text_of(error)
    for pattern, kind in _MEANINGS:
        if match := pattern.match(text):
            if reader is None:
                return kind(f"{match[1]}: {text}", key=match[1])
            if kind is ArrayNotFoundError:
                return array_not_found(match[1], reader.keys, reader.checkpoint_id)
            path = str(reader.checkpoint_id)
            return kind(f"{match[1]}: {text}, in {path}", key=match[1], path=path)
    return as_checkpoint_error(error if isinstance(error, Exception) else RuntimeError(text))


def _of_ranks(comm: Communicator, causes: Mapping[int, CheckpointError]) -> CheckpointError:
    """The error for this rank if these ranks of the group have failed."""
    rank = comm.rank if comm.rank in causes else min(causes)
    cause, who = causes[rank], comm.global_ranks[rank]
    if rank == comm.rank:
        return cause.at_rank(who)
    return error_from_peer(who, kind_of(cause), cause.message, key=cause.key, path=cause.path)
