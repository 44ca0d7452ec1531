"""Retrieve packs at a load: from this node's disk, or from a rank that has a copy."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from dist_ckpt_strategies.comm.base import Communicator, Message
from dist_ckpt_strategies.comm.exchange import Blocks, Incoming, Outgoing, exchange
from dist_ckpt_strategies.device import TensorBytes, host_memory
from dist_ckpt_strategies.errors import CheckpointError, StorageTimeoutError, as_checkpoint_error
from dist_ckpt_strategies.formats.pack_write import SUFFIX
from dist_ckpt_strategies.local.packs import LoadedShard, ReceivedPack, read_shard
from dist_ckpt_strategies.local.plan import ExchangePlan, LocalShardId, Transfer
from dist_ckpt_strategies.storage.files import Directory
from dist_ckpt_strategies.storage.io_pool import Deadline


class Copy(NamedTuple):
    """A file whose description is good, in the directory of its holder, and its size."""

    holder: int
    shard_id: LocalShardId
    world_size: int
    nbytes: int

    @property
    def name(self) -> str:
        """The file below the directory of the node."""
        return f"{self.holder}/{self.shard_id}{SUFFIX}"


Received = dict[Transfer, torch.Tensor]
"""Packs of other ranks in host memory; nothing in them has been compared with a digest yet."""


def exchange_packs(
    comm: Communicator,
    transfers: Sequence[Transfer],
    sizes: Mapping[int, Mapping[str, int]] | Sequence[Mapping[str, int]],
    read: Callable[[str, int, torch.Tensor], torch.Tensor],
    finish: Callable[[Received], Message],
    max_inflight_nbytes: int,
) -> list[Message]:
    """Carry packs between ranks; returns what ``finish`` returned on every rank. Collective.

    Args:
        comm: the ranks; transfers are in their numbers.
        transfers: equal on all ranks.
        sizes: of the packs, by sender and id.
        read: bytes of a pack of this rank, from a byte on: in the memory given or in other.
        finish: gets what arrived, and compares it.
        max_inflight_nbytes: bound on what travels at once in each direction.
    """
    received: Received = {}

    def prepare() -> Blocks:
        outgoing, incoming = [], []
        for t in transfers:
            if t.sender == comm.rank != t.receiver:
                nbytes = sizes[t.sender][t.id_]
                outgoing.append(Outgoing(t.id_, t.receiver, nbytes, partial(read, t.id_)))
            elif t.receiver == comm.rank != t.sender:
                memory = received[t] = host_memory(sizes[t.sender][t.id_], is_pinned=False)
                target = TensorBytes([memory])
                incoming.append(Incoming.of(t.id_, t.sender, target, comm.device))
        return outgoing, incoming

    return exchange(
        comm, prepare, lambda: finish(received), max_inflight_nbytes=max_inflight_nbytes
    )


def run_retrieve(
    comm: Communicator,
    plan: ExchangePlan,
    copies: Mapping[int, Mapping[str, Copy]],
    directory: Directory,
    *,
    max_inflight_nbytes: int,
    timeout_s: float,
) -> tuple[list[LoadedShard], dict[tuple[int, str], str]]:
    """Carry out a plan: read, send, receive, and compare every digest.

    Collective: every rank of ``comm`` calls this for an equal plan, and equal ``copies`` of each
    rank, by id, below its own ``directory``. A copy that is damaged or cannot be read is no error.

    Returns what this rank wanted; and the same on every rank, why copies cannot be used: the
    reason by the rank that reads the copy, within the group, and by id. If there is any, what was
    to come from it is missing.
    """
    failures: dict[tuple[int, str], CheckpointError] = {}
    shards: list[LoadedShard] = []

    def read(id_: str, start: int, buffer: torch.Tensor) -> torch.Tensor:
        """Bytes of a file, on the host; zeros once something is wrong with it."""
        host = buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
        with _noted(failures, (comm.rank, id_)):
            if (comm.rank, id_) not in failures:
                directory.read_into(copies[comm.rank][id_].name, start, [host.numpy()])
                return host
        return host.zero_()

    def verify(received: Received) -> Message:
        deadline = Deadline.after(timeout_s)
        for t in plan.entries:
            if t.receiver == comm.rank:
                place: Any = directory
                if t in received:
                    place = ReceivedPack(f"from rank {t.sender}", received[t].numpy())
                with _noted(failures, (t.sender, t.id_)):
                    shards.append(read_shard(place, copies[t.sender][t.id_].name, deadline))
        return [[*which, str(error)] for which, error in failures.items()]

    sizes = {
        rank: {id_: copy.nbytes for id_, copy in some.items()} for rank, some in copies.items()
    }
    answers = exchange_packs(comm, plan.entries, sizes, read, verify, max_inflight_nbytes)
    # Of two reasons, that of the rank that reads the file, which names it.
    rows = sorted(
        (who == reader, reader, id_, why)
        for who, found in enumerate(answers)
        for reader, id_, why in found
    )
    return shards, {(reader, id_): why for _, reader, id_, why in rows}


@contextmanager
def _noted(
    failures: dict[tuple[int, str], CheckpointError], which: tuple[int, str]
) -> Iterator[None]:
    """What is wrong with a file is reported to all ranks, which use another copy."""
    try:
        yield
    except StorageTimeoutError:
        raise
    except Exception as error:  # noqa: BLE001 - see above
        failures[which] = as_checkpoint_error(error)
