"""A process group with NCCL's rules, on the host: what would hang or be garbage raises, by name.

Its tensors are those of ``played_cuda``. Each communicator, or in the worst case the device, does
its works one after the other on a thread; bytes travel through the store, which so is where ranks
find each other. tests/nccl/test_rules.py breaks each rule.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import reduce
from queue import SimpleQueue
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from dist_ckpt_strategies.comm.interruptible_gloo import _gloo_group
from tests.support.played_cuda import (
    HOST_WAITS,
    PENDING,
    CudaTensor,
    RuleBrokenError,
    current_stream,
    fill_with_garbage,
    memory_of,
    play_cuda,
)
from tests.support.processes import is_running

STUCK_S = 6.0
"""A work at the head of its queue for so long, with peers alive, will never be done."""

WATCHDOG_EXIT = 86

_c10d: Any = dist.distributed_c10d
_BACKEND = "nccl_rules"
_POLL = timedelta(milliseconds=20)
_REDUCED: dict[Any, Callable[[Any, Any], Any]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class _AbortedError(Exception):
    """The communicator was aborted: its works end, without an error, with garbage."""


class _PeerDiedError(dist.DistBackendError):
    """What the watchdog ends the process for."""


class NcclWork(dist.Work):
    """A work in its queue. ``wait`` holds up a stream; with a timeout, the host too."""

    def __init__(
        self,
        group: NcclRules,
        name: str,
        inputs: Iterable[torch.Tensor],
        outputs: Iterable[torch.Tensor],
        body: Callable[[NcclWork], None],
    ) -> None:
        super().__init__()
        self.group, self.name = group, f"{name} of group {group.getGroupName()}"
        self.inputs, self.outputs = list(map(memory_of, inputs)), list(map(memory_of, outputs))
        self.error: Exception | None = None
        self._body = body
        self._behind = [work for work in current_stream().works if isinstance(work, NcclWork)]
        self._done = threading.Event()

    def run(self) -> None:
        """On the thread of the queue."""
        for work in self._behind:
            work._done.wait()
        try:
            self.group.require_moving()
            self._body(self)
        except _AbortedError:
            pass
        except Exception as error:  # noqa: BLE001 - raised where the work is waited for
            self.error = error
            if isinstance(error, _PeerDiedError) and (
                os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0"
            ):
                os._exit(WATCHDOG_EXIT)
        PENDING.remove(self)
        self._done.set()

    def block(self) -> None:
        """Return when it is done; raises its error."""
        self._done.wait()
        if self.error is not None:
            raise self.error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """See above."""
        current_stream().works.append(self)
        if timeout > timedelta(0):
            HOST_WAITS.append("wait")
        if timeout > timedelta(0) and not self._done.wait(timeout.total_seconds()):
            self.group.abort()
            raise dist.DistBackendError(f"{self.name}: timed out after {timeout}; aborted")
        if self._done.is_set():
            self.block()
        return True

    def is_completed(self) -> bool:
        """Also where it ended with an error, or by abort."""
        return self._done.is_set()


_ProcessGroup: Any = dist.ProcessGroup


class NcclRules(_ProcessGroup):  # type: ignore[misc]
    """See above. CPU tensors are refused, or go over gloo where the group has it too."""

    separate_queues: ClassVar[bool] = False
    """One queue for each communicator; by default all share one, the worst that NCCL permits."""

    abort_delay_s: ClassVar[dict[str, float]] = {}
    """Seconds that the abort of a group takes, by its name."""

    _broken: ClassVar[RuleBrokenError | None] = None
    """Where a queue has been found to be stuck, it stays so."""

    _queues: ClassVar[dict[Any, SimpleQueue[NcclWork]]] = {}
    _heads: ClassVar[dict[Any, list[NcclWork]]] = {}

    def __init__(self, options: Any, gloo: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._store, self._limit_s = options.store, options.timeout.total_seconds()
        self._rank, self._size, self._name = options.group_rank, options.group_size, ""
        self._gloo = gloo
        self._is_aborted = False
        self._made: set[str] = set()
        self._num_done = 0
        self._num_messages: dict[tuple[int, int, str], int] = {}
        self._store.set(f"pid/{self._rank}", str(os.getpid()))

    # What torch asks of a group.

    def name(self) -> str:
        """The backend's."""
        return "nccl"

    getBackendName = name  # noqa: N815 - torch calls it

    def getGroupName(self) -> str:  # noqa: N802 - torch calls it
        """Torch's."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch calls it
        """Torch's."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch calls it
        """None."""
        return ""

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - torch calls it
        """Not used."""

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] * (self._gloo is not None) + [torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cuda" else self._gloo

    def abort(self) -> None:
        """End pending works, with garbage; later ones raise."""
        time.sleep(self.abort_delay_s.get(self._name, 0.0))
        self._is_aborted = True

    shutdown = abort

    def require_moving(self) -> None:
        """Raise if the device's queues are stuck."""
        if NcclRules._broken is not None:
            raise NcclRules._broken

    # Collectives.

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        """In place; aborted, each rank keeps its own numbers."""
        if self._is_for_gloo(tensors):
            return self._gloo.allreduce(tensors, options or _c10d.AllreduceOptions())
        op = getattr(options, "reduceOp", dist.ReduceOp.SUM)
        kind = next(kind for kind in _REDUCED if op == kind)

        def take(found: list[bytes], work: NcclWork) -> None:
            parts = [_typed(content, work.outputs[0]) for content in found]
            total = reduce(_REDUCED[kind], parts)
            work.outputs[0].copy_(total / self._size if op == dist.ReduceOp.AVG else total)

        return self._collective(f"all_reduce {kind}", tensors, tensors, take)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """Into a list."""
        if self._is_for_gloo(inputs):
            return self._gloo.allgather(outputs, inputs, options or _c10d.AllgatherOptions())
        return self._collective("all_gather", inputs, outputs[0], _take_each)

    def _allgather_base(self, output: Any, input_: Any, options: Any = None) -> Any:
        """Into one tensor."""
        if self._is_for_gloo([input_]):
            return self._gloo._allgather_base(output, input_, options)
        return self._collective(
            "all_gather", [input_], list(output.view(-1).chunk(self._size)), _take_each
        )

    all_gather_single = _allgather_base

    def broadcast(self, tensors: Any, options: Any) -> Any:
        """From ``options.rootRank``."""
        if self._is_for_gloo(tensors):
            return self._gloo.broadcast(tensors, options)
        root = options.rootRank

        def take(found: list[bytes], work: NcclWork) -> None:
            _take_each([found[root]], work)

        is_root = self._rank == root
        return self._collective(
            f"broadcast of rank {root}", tensors, [] if is_root else tensors, take
        )

    def barrier(self, *_args: Any, **_options: Any) -> Any:
        """The host waits."""
        work = self.allreduce([torch.zeros(1, device="cuda")])
        work.wait(timedelta(seconds=self._limit_s))
        return work

    def _collective(
        self,
        name: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        take: Callable[[list[bytes], NcclWork], None],
    ) -> NcclWork:
        signature = f"{name} of {[(tuple(t.shape), str(t.dtype)) for t in inputs]}"

        def body(work: NcclWork) -> None:
            number = self._num_done
            self._num_done += 1
            self._put(f"{number}/{self._rank}", (signature, _bytes_of(work.inputs)))
            found = [self._get(f"{number}/{r}", [r], work) for r in range(self._size)]
            for rank, (other, _) in enumerate(found):
                if other != signature:
                    raise RuleBrokenError(
                        f"one order per communicator: work {number} of group {self._name} is "
                        f"{signature} on rank {self._rank}, {other} on rank {rank}"
                    )
            take([content for _, content in found], work)

        return self._issue(name, inputs, outputs, body, range(self._size))

    # Messages.

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """Over a communicator of the two."""
        if self._is_for_gloo(tensors):
            return self._gloo.send(tensors, peer, tag)
        return self._messages([(True, tensors[0], peer)], (self._rank, peer))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        """Over a communicator of the two."""
        if self._is_for_gloo(tensors):
            return self._gloo.recv(tensors, peer, tag)
        return self._messages([(False, tensors[0], peer)], (self._rank, peer))

    def batch(self, operations: Sequence[dist.P2POp]) -> list[Any]:
        """All at once, over the group's communicator."""
        if self._is_for_gloo([each.tensor for each in operations]):
            return [each.op(each.tensor, each.peer, each.group) for each in operations]
        found = [(e.op is dist.isend, e.tensor, e.group_peer) for e in operations]
        return [self._messages(found, range(self._size))]

    def _messages(
        self, messages: Sequence[tuple[bool, torch.Tensor, int]], members: Sequence[int]
    ) -> NcclWork:
        where = f"p2p/{sorted(members)}"
        name = " and ".join(
            f"{'send to' if is_send else 'recv from'} {peer}" for is_send, _, peer in messages
        )

        def body(work: NcclWork) -> None:
            sent, wanted = iter(work.inputs), iter(work.outputs)
            waits = []
            for is_send, _, peer in messages:
                ends = (self._rank, peer) if is_send else (peer, self._rank)
                number = self._num_messages.get((*ends, where), 0)
                self._num_messages[*ends, where] = number + 1
                key = f"{where}/{ends[0]}-{ends[1]}/{number}"
                mine = next(sent if is_send else wanted)
                content = _bytes_of([mine]) if is_send else b""
                kind = (mine.numel(), str(mine.dtype))
                self._put(f"{key}/{'sent' if is_send else 'wanted'}", (kind, content))
                waits.append((f"{key}/{'wanted' if is_send else 'sent'}", peer, is_send, mine))
            for key, peer, is_send, mine in waits:
                kind, content = self._get(key, [peer], work)
                if kind != (mine.numel(), str(mine.dtype)):
                    raise RuleBrokenError(
                        f"rendezvous of messages: {work.name} on rank {self._rank} has "
                        f"{mine.numel()} elements of {mine.dtype}, the other end {kind}"
                    )
                if not is_send:
                    mine.copy_(_typed(content, mine))

        inputs = [tensor for is_send, tensor, _ in messages if is_send]
        outputs = [tensor for is_send, tensor, _ in messages if not is_send]
        return self._issue(name, inputs, outputs, body, members)

    # The device.

    def _is_for_gloo(self, tensors: Sequence[torch.Tensor]) -> bool:
        if all(isinstance(tensor, CudaTensor) for tensor in tensors):
            return False
        if self._gloo is None:
            raise RuleBrokenError(f"CPU tensors are refused: by group {self._name}, over NCCL")
        return True

    def _issue(
        self,
        name: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        body: Callable[[NcclWork], None],
        members: Sequence[int],
    ) -> NcclWork:
        if self._is_aborted:
            raise dist.DistBackendError(f"{name}: the communicator of {self._name} was aborted")
        work = NcclWork(self, name, inputs, outputs, body)
        self._make_communicator(work, members)
        for memory in work.outputs:
            if not any(memory.data_ptr() == other.data_ptr() for other in work.inputs):
                fill_with_garbage(memory)
        PENDING.append(work)
        queue = id(self) if self.separate_queues else None
        if queue not in self._queues:
            self._queues[queue], self._heads[queue] = SimpleQueue(), []
            threading.Thread(target=_run_queue, args=(queue,), daemon=True).start()
        self._heads[queue].append(work)
        self._queues[queue].put(work)
        return work

    def _make_communicator(self, work: NcclWork, members: Sequence[int]) -> None:
        """The host waits for all members."""
        which = f"made/{sorted(members)}"
        if which in self._made:
            return
        self._store.set(f"{which}/{self._rank}", b"")
        try:
            for peer in members:
                self._await([f"{which}/{peer}"], [peer], work, self._store)
        except (RuleBrokenError, _AbortedError) as error:
            raise RuleBrokenError(
                f"communicators are made by all members at first use: that of ranks "
                f"{sorted(members)} of group {self._name}, by {work.name}: {error}"
            ) from error
        self._made.add(which)

    def _put(self, key: str, value: Any) -> None:
        if self._is_aborted:
            raise _AbortedError
        self._thread_store().set(key, pickle.dumps(value))

    def _get(self, key: str, peers: Sequence[int], work: NcclWork) -> Any:
        store = self._thread_store()
        self._await([key], peers, work, store)
        return pickle.loads(store.get(key))

    def _thread_store(self) -> Any:
        """A connection of this thread's own: one that waits holds up the others."""
        found = vars(_stores).setdefault("of_groups", {})
        if self._name not in found:
            found[self._name] = self._store.clone()
        return found[self._name]

    def _await(self, keys: list[str], peers: Sequence[int], work: NcclWork, store: Any) -> None:
        began = time.monotonic()
        while True:
            if self._is_aborted:
                raise _AbortedError
            try:
                store.wait(keys, _POLL)
            except RuntimeError as error:
                self._require_progress(work, peers, time.monotonic() - began, error)
            else:
                return

    def _require_progress(
        self, work: NcclWork, peers: Sequence[int], waited_s: float, error: Exception
    ) -> None:
        """Raise if a peer has died, or does not come: the queues of the ranks wait in a circle."""
        if self._is_aborted:
            raise _AbortedError
        if not isinstance(error, dist.DistStoreError):
            raise error  # the store's connection is cut
        for peer in peers:
            key = f"pid/{peer}"
            if self._store.check([key]) and not is_running(int(self._store.get(key))):
                raise _PeerDiedError(f"watchdog: rank {peer} has died in {work.name}")
        if waited_s >= self._limit_s:
            raise _PeerDiedError(f"watchdog: {work.name} waits for ranks {list(peers)}")
        if waited_s >= STUCK_S:
            behind = [w.name for works in self._heads.values() for w in works if w is not work]
            NcclRules._broken = RuleBrokenError(
                f"a queue is done in order: on rank {self._rank} {work.name} waits for ranks "
                f"{list(peers)}; others in the device's queues: {behind}"
            )
            raise NcclRules._broken


_stores = threading.local()


def _run_queue(queue: Any) -> None:
    while True:
        work = NcclRules._queues[queue].get()
        work.run()
        NcclRules._heads[queue].remove(work)
        del work


def _take_each(found: Sequence[bytes], work: NcclWork) -> None:
    for memory, content in zip(work.outputs, found, strict=False):
        memory.copy_(_typed(content, memory))


def _bytes_of(memory: Sequence[torch.Tensor]) -> bytes:
    return b"".join(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in memory)


def _typed(content: bytes, like: torch.Tensor) -> torch.Tensor:
    if not content:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(bytearray(content), dtype=like.dtype).reshape(like.shape)


def play_nccl(*, separate_queues: bool = False) -> None:
    """Have this process see one CUDA device, and NCCL; ``backend="nccl"`` makes such groups."""
    play_cuda()
    NcclRules.separate_queues = separate_queues
    make, plain_batch = _c10d._new_process_group_helper, dist.batch_isend_irecv

    def make_group(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kw: Any) -> Any:
        asked = str(backend)
        if "nccl" not in asked:
            return make(size, rank, ranks, backend, *args, **kw)

        def create(options: Any, _backend_options: Any) -> NcclRules:
            gloo = None
            if "gloo" in asked:
                store = PrefixStore("gloo", options.store)
                gloo = _gloo_group(store, options.group_rank, options.group_size, options.timeout)
            return NcclRules(options, gloo)

        dist.Backend.register_backend(_BACKEND, create, extended_api=True, devices=["cuda"])
        group, store = make(size, rank, ranks, dist.Backend(_BACKEND), *args, **kw)
        if group in _c10d._world.pg_map:
            _c10d._world.pg_map[group] = (backend, store)
            _c10d._world.pg_backend_config[group] = asked if ":" in asked else "cuda:nccl"
        return group, store

    def batch(operations: list[dist.P2POp]) -> list[Any]:
        group: Any = operations[0].group
        is_ours = isinstance(group, NcclRules)
        return group.batch(operations) if is_ours else plain_batch(operations)

    _c10d._new_process_group_helper = make_group
    _c10d.batch_isend_irecv = batch
    vars(dist)["batch_isend_irecv"] = batch


def join_nccl(backend: str = "nccl", *, separate_queues: bool = False) -> None:
    """Make a world over NCCL in place of the gloo world of tests' ranks. Collective."""
    play_nccl(separate_queues=separate_queues)
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        backend,
        store=PrefixStore("nccl", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
