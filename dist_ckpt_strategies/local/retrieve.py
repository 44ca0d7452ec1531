"""Retrieve the newest save that is whole: from this node's disk, or from ranks that have copies.

In a load the ranks talk five times: about their directories (1) and the files in these (2), for
the inventory; before the packs travel (3), and about copies that cannot be used (4), both again
where there are any; and about the states that the packs give (5).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from dist_ckpt_strategies.comm.base import Communicator, Message
from dist_ckpt_strategies.comm.exchange import Blocks, Incoming, Outgoing, exchange
from dist_ckpt_strategies.comm.tensor_bytes import TensorBytes
from dist_ckpt_strategies.device import host_memory
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    NoReplicasAvailableError,
    StorageError,
    StorageTimeoutError,
    as_checkpoint_error,
)
from dist_ckpt_strategies.local.inventory import Inventory
from dist_ckpt_strategies.local.packs import LoadedShard, ReceivedPack, read_shard
from dist_ckpt_strategies.local.plan import (
    ExchangePlan,
    LocalShardId,
    Transfer,
    build_exchange_plan,
)
from dist_ckpt_strategies.local.shard_files import ShardDirectory, ShardFile
from dist_ckpt_strategies.storage.files import Directory
from dist_ckpt_strategies.storage.io_pool import WORK, Deadline

Received = dict[Transfer, torch.Tensor]
"""Packs of other ranks in host memory; nothing in them has been compared with a digest yet."""


def pack_blocks(
    comm: Communicator,
    transfers: Iterable[Transfer],
    sizes: Mapping[int, Mapping[str, int]] | Sequence[Mapping[str, int]],
    read: Callable[[str, int, torch.Tensor], torch.Tensor],
    received: Received,
) -> Blocks:
    """The packs of ``transfers``, in ranks of ``comm``, as blocks for ``exchange``. Rank-local.

    ``sizes`` are those of the packs, by sender and id; ``read`` gives bytes of a pack of this rank,
    from a byte on, in the memory given or in other; ``received`` gets memory for those of others.
    """
    outgoing, incoming = [], []
    for t in transfers:
        if t.sender == comm.rank != t.receiver:
            nbytes = sizes[t.sender][t.id_]
            outgoing.append(Outgoing(t.id_, t.receiver, nbytes, partial(read, t.id_)))
        elif t.receiver == comm.rank != t.sender:
            memory = received[t] = host_memory(sizes[t.sender][t.id_], is_pinned=False)
            incoming.append(Incoming.of(t.id_, t.sender, TensorBytes([memory]), comm.device))
    return outgoing, incoming


def load_newest(
    comm: Communicator,
    directory: ShardDirectory,
    inventory: Inventory,
    max_inflight_nbytes: int,
    timeout_s: float,
) -> list[LoadedShard]:
    """This rank's shard of the newest save whose shards can all be read undamaged.

    Collective. Copies that turn out to be damaged leave the ``inventory``, and others are used.
    Where another number of ranks saved it, each rank gets some of the shards. Errors are those of
    the manager's ``load``.
    """
    reasons = [*inventory.unread]
    while True:
        try:
            readable, plan = _plan(inventory, reasons, directory)
        except CheckpointError as error:  # on all ranks alike
            error.at_rank(comm.rank)
            raise
        shards, bad = _run(comm, plan, readable, directory.place, max_inflight_nbytes, timeout_s)
        if not bad:
            return shards
        reasons += bad.values()
        for rank, id_ in bad:
            copies = inventory.copies[inventory.nodes[rank]]
            if readable[rank][id_] in copies:  # two ranks of a node may have read the same one
                copies.remove(readable[rank][id_])


def _plan(
    inventory: Inventory, reasons: Sequence[str], directory: ShardDirectory
) -> tuple[dict[int, dict[str, ShardFile]], ExchangePlan]:
    """Copies of the shards of the newest save, by rank and id, and who reads which for whom."""
    newest, size = inventory.newest(), len(inventory.nodes)
    if newest is None:
        missing = inventory.missing_text()
        if not reasons and not (missing and inventory.has_finished):
            text = f"no local checkpoint below {directory} on any node"
            text += missing and f", but what a save that was killed has left: {missing}"
            if inventory.foreign:
                raise StorageError(f"{text}; {inventory.foreign}", path=str(directory))
            raise CheckpointNotFoundError(text, path=str(directory))
        why = "; ".join(filter(None, [missing, *reasons]))
        raise NoReplicasAvailableError(
            None,
            f"no local checkpoint is complete: {why}; start on the nodes that have the shards, or "
            "remove those that are left to go without them",
        )
    readable = inventory.of_save(newest)
    save, num_shards = newest  # another number than that of the ranks, if others saved it
    wanted = {
        rank: [
            str(LocalShardId(save, number)) for number in range(rank % num_shards, num_shards, size)
        ]
        for rank in range(size)
    }
    return readable, build_exchange_plan(readable, wanted)


def _run(
    comm: Communicator,
    plan: ExchangePlan,
    copies: Mapping[int, Mapping[str, ShardFile]],
    directory: Directory,
    max_inflight_nbytes: int,
    timeout_s: float,
) -> tuple[list[LoadedShard], dict[tuple[int, str], str]]:
    """Carry out a plan: read, send, receive, and compare every digest. Collective.

    ``copies`` are those of each rank, by id, below its own ``directory``. A copy that is damaged or
    cannot be read is no error.

    Returns what this rank wanted; and the same on every rank, why copies cannot be used: the
    reason by the rank that reads the copy, within the group, and by id. If there is any, what was
    to come from it is missing.
    """
    failures: dict[tuple[int, str], CheckpointError] = {}
    shards: list[LoadedShard] = []
    received: Received = {}

    def read(id_: str, start: int, buffer: torch.Tensor) -> torch.Tensor:
        """Bytes of a file, on the host; zeros once something is wrong with it."""
        host = buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
        with _noted(failures, (comm.rank, id_)):
            if (comm.rank, id_) not in failures:
                directory.read_into(copies[comm.rank][id_].name, start, [host.numpy()])
                return host
        return host.zero_()

    def verify(deadline: Deadline) -> Message:
        for t in plan.entries:
            if t.receiver == comm.rank:
                place: Any = directory
                if t in received:
                    place = ReceivedPack(f"from rank {t.sender}", received[t].numpy())
                with _noted(failures, (t.sender, t.id_)):
                    shards.append(read_shard(place, copies[t.sender][t.id_].name, deadline))
        return [[*which, str(error)] for which, error in failures.items()]

    sizes = {
        rank: {id_: copy.nbytes for id_, copy in by_id.items()} for rank, by_id in copies.items()
    }
    answers = exchange(  # 3, 4
        comm,
        lambda: pack_blocks(comm, plan.entries, sizes, read, received),
        verify,
        max_inflight_nbytes=max_inflight_nbytes,
        storage_s=WORK * timeout_s,
    )
    # Of two reasons, that of the rank that reads the file, which names it.
    rows = sorted(
        (who == reader, reader, id_, why)
        for who, reasons in enumerate(answers)
        for reader, id_, why in reasons
    )
    return shards, {(reader, id_): why for _, reader, id_, why in rows}


@contextmanager
def _noted(
    failures: dict[tuple[int, str], CheckpointError], which: tuple[int, str]
) -> Iterator[None]:
    """Note the error of a file for all ranks, which then use another copy."""
    try:
        yield
    except StorageTimeoutError:
        raise
    except Exception as error:  # noqa: BLE001 - see above
        failures[which] = as_checkpoint_error(error)
