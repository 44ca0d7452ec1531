"""A process group with NCCL's rules, on the host: what would hang or be garbage raises, by name.

Its tensors are those of ``played_cuda``. Each communicator, or in the worst case the device, does
its works one after the other on a thread; bytes travel through the store of the group.
tests/nccl/test_rules.py breaks each rule.
"""

from __future__ import annotations

import functools
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.utils._pytree import tree_flatten

from dist_ckpt_strategies.comm.interruptible_gloo import gloo_group
from tests.support.played_cuda import (
    PENDING,
    CudaTensor,
    RuleBrokenError,
    current_stream,
    fill_with_garbage,
    memory_of,
    play_cuda,
)
from tests.support.processes import is_running

WATCHDOG_EXIT = 86

_c10d: Any = dist.distributed_c10d
_BACKEND = "nccl_rules"
_POLL_S = 0.002
_REDUCED: dict[Any, Callable[[Any, Any], Any]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
}


class _WatchdogError(dist.DistBackendError):
    """What the watchdog ends the process for."""


class NcclWork(dist.Work):
    """A work in its queue. ``wait`` holds up a stream; with a timeout, the host too."""

    def __init__(self, group: NcclRules, name: str, members: Sequence[int]) -> None:
        super().__init__()
        self.group, self.members = group, sorted(members)
        self.name = f"{name} of group {group.getGroupName()}"
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.puts: list[tuple[str, str, list[torch.Tensor]]] = []
        """Keys, what others have to expect there, and what they get."""
        self.gets: list[tuple[str, str, int]] = []  # keys, what is expected there, and from whom
        self.take: Callable[[list[bytes]], None] = lambda _: None
        self.error: Exception | None = None
        self.done = threading.Event()
        self._behind = [work for work in current_stream().works if isinstance(work, NcclWork)]

    def run(self) -> None:
        """On the thread of the queue."""
        for work in self._behind:
            work.done.wait()
        try:
            self._exchange()
        except Exception as error:  # noqa: BLE001 - raised where the work is waited for
            if not self.group.is_aborted:
                self.error = error
            handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
            if isinstance(self.error, _WatchdogError) and handling != "0":
                os._exit(WATCHDOG_EXIT)
        self.done.set()

    def _exchange(self) -> None:
        if NcclRules.broken is not None:
            raise NcclRules.broken
        store, found = self.group.store, []
        for key, signature, memory in self.puts:
            self.group.require_alive()
            store.set(key, pickle.dumps((signature, _bytes_of(memory))))
        for key, signature, peer in self.gets:
            self.group.await_key(key, peer, self)
            other, content = pickle.loads(store.get(key))
            if other != signature:
                raise RuleBrokenError(
                    f"one order per communicator: {key} of group {self.group.getGroupName()} is "
                    f"{signature} on rank {self.group.rank()}, {other} on rank {peer}"
                )
            found.append(content)
        self.take(found)

    def block(self) -> None:
        """Return when it is done; raises its error."""
        self.done.wait()
        self.is_completed()
        if self.error is not None:
            raise self.error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        current_stream().works.append(self)
        if timeout > timedelta(0) and not self.done.wait(timeout.total_seconds()):
            self.group.abort()
            raise dist.DistBackendError(f"{self.name}: timed out after {timeout}; aborted")
        if self.is_completed():
            self.block()
        return True

    def is_completed(self) -> bool:
        """Also where it ended with an error, or by abort."""
        if self.done.is_set():
            with suppress(ValueError):  # it was known before
                PENDING.remove(self)
        return self.done.is_set()


def _over_gloo_too(call: Callable[..., Any]) -> Callable[..., Any]:
    """CPU tensors go over gloo where the group has it, and are refused where not."""

    @functools.wraps(call)
    def either(self: NcclRules, *args: Any) -> Any:
        tensors = [t for t in tree_flatten(args)[0] if isinstance(t, torch.Tensor)]
        if all(isinstance(tensor, CudaTensor) for tensor in tensors):
            return call(self, *args)
        if self.gloo is None:
            raise RuleBrokenError(
                f"CPU tensors are refused: by group {self.getGroupName()}, over NCCL"
            )
        return getattr(self.gloo, call.__name__)(*args)

    return either


_ProcessGroup: Any = dist.ProcessGroup


class NcclRules(_ProcessGroup):  # type: ignore[misc]
    """See above."""

    separate_queues: ClassVar[bool] = False
    """One queue for each communicator; by default all share one, the worst that NCCL permits."""

    abort_delay_s: ClassVar[dict[str, float]] = {}
    """Seconds that the abort of a group takes, by its name."""

    stuck_s: ClassVar[float] = 15.0
    """A work at the head of its queue for so long, with peers alive, will never be done."""

    broken: ClassVar[RuleBrokenError | None] = None
    """Where a queue has been found to be stuck, it stays so."""

    _queues: ClassVar[dict[Any, SimpleQueue[NcclWork]]] = {}

    def __init__(self, options: Any, gloo: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        # A connection of its own: others wait in that of the world.
        self.store, self._limit_s = options.store.clone(), options.timeout.total_seconds()
        self.gloo, self.is_aborted = gloo, False
        self._name, self._everyone = "", range(options.group_size)
        self._made: set[str] = set()
        self._numbers: Counter[str] = Counter()
        self.store.set(f"pid/{self.rank()}", str(os.getpid()))

    def getGroupName(self) -> str:  # noqa: N802 - torch calls it
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] * (self.gloo is not None) + [torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cuda" else self.gloo

    def abort(self) -> None:
        """End pending works, with garbage; later ones raise, if there is a communicator.

        Returns when the device has none of them any more.
        """
        time.sleep(self.abort_delay_s.get(self._name, 0.0))
        self.is_aborted = bool(self._made)
        self._await_works()

    shutdown = abort

    def _await_works(self) -> None:
        for work in [work for work in PENDING if work.group is self]:
            if not work.done.wait(self.stuck_s / 2):  # before the queue itself counts as stuck
                NcclRules.broken = RuleBrokenError(
                    f"communicators are aborted together: on rank {self.rank()} the abort of "
                    f"{self._name} waits for {work.name}, which is behind another's works"
                )
                raise NcclRules.broken

    # Collectives.

    @_over_gloo_too
    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        """In place; aborted, each rank keeps its own numbers."""
        op = getattr(options, "reduceOp", dist.ReduceOp.SUM)
        kind = next(kind for kind in _REDUCED if op == kind)
        (memory,) = map(memory_of, tensors)

        def take(found: list[bytes]) -> None:
            parts = [_typed(each, memory) for each in found]
            memory.copy_(functools.reduce(_REDUCED[kind], parts))

        return self._collective(f"all_reduce {kind}", tensors, tensors, take)

    @_over_gloo_too
    def allgather(self, outputs: Any, inputs: Any, _options: Any = None) -> Any:
        """Into a list."""
        return self._collective("all_gather", inputs, outputs[0])

    @_over_gloo_too
    def alltoall_base(self, *_: Any) -> Any:
        """Over gloo alone."""
        raise RuleBrokenError("the model has no all-to-all of tensors on a GPU")

    @_over_gloo_too
    def broadcast(self, tensors: Any, options: Any) -> Any:
        root, memory = options.rootRank, list(map(memory_of, tensors))

        def take(found: list[bytes]) -> None:
            _fill(memory, found[root : root + 1])

        return self._collective(
            f"broadcast from {root}", tensors, tensors, take, sends=self.rank() == root
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
        take: Callable[[list[bytes]], None] | None = None,
        *,
        sends: bool = True,
    ) -> NcclWork:
        work = NcclWork(self, name, self._everyone)
        work.inputs = list(map(memory_of, inputs)) if sends else []
        work.outputs = list(map(memory_of, outputs))
        signature = f"{name} of {[(tuple(t.shape), str(t.dtype)) for t in inputs]}"
        key = self._numbered("work")
        work.puts = [(f"{key}/{self.rank()}", signature, work.inputs)]
        work.gets = [(f"{key}/{rank}", signature, rank) for rank in self._everyone]
        work.take = take or (lambda found: _fill(work.outputs, found))
        return self._issue(work)

    # Messages.

    @_over_gloo_too
    def send(self, tensors: Any, peer: int, _tag: int = 0) -> Any:
        """Over a communicator of the two."""
        return self.messages([(True, tensors[0], peer)], (self.rank(), peer))

    @_over_gloo_too
    def recv(self, tensors: Any, peer: int, _tag: int = 0) -> Any:
        """Over a communicator of the two."""
        return self.messages([(False, tensors[0], peer)], (self.rank(), peer))

    def messages(
        self, messages: Sequence[tuple[bool, torch.Tensor, int]], members: Sequence[int] = ()
    ) -> NcclWork:
        """All at once, sent or else received; by default over the group's communicator."""
        name = " and ".join(f"{'send to' if out else 'recv from'} {p}" for out, _, p in messages)
        work = NcclWork(self, name, members or self._everyone)
        for is_send, tensor, peer in messages:
            memory = memory_of(tensor)
            ends = (self.rank(), peer) if is_send else (peer, self.rank())
            key = self._numbered(f"message {ends} over {work.members}")
            signature = f"{memory.numel()} elements of {memory.dtype}"
            here, there = ("sent", "wanted") if is_send else ("wanted", "sent")
            (work.inputs if is_send else work.outputs).append(memory)
            work.puts.append((f"{key}/{here}", signature, [memory] * is_send))
            work.gets.append((f"{key}/{there}", signature, peer))
        is_sent = [is_send for is_send, _, _ in messages]
        work.take = lambda found: _fill(
            work.outputs, [each for each, out in zip(found, is_sent, strict=True) if not out]
        )
        return self._issue(work)

    # The device.

    def _numbered(self, what: str) -> str:
        self._numbers[what] += 1
        return f"{what} {self._numbers[what]}"

    def _issue(self, work: NcclWork) -> NcclWork:
        self.require_alive()
        self._make_communicator(work)
        inputs = {memory.data_ptr() for memory in work.inputs}
        for memory in work.outputs:
            if memory.data_ptr() not in inputs:
                fill_with_garbage(memory)
        PENDING.append(work)
        which = id(self) if self.separate_queues else None
        if which not in self._queues:
            self._queues[which] = SimpleQueue()
            threading.Thread(target=_run_all, args=(self._queues[which],), daemon=True).start()
        self._queues[which].put(work)
        return work

    def _make_communicator(self, work: NcclWork) -> None:
        """The host waits for all members."""
        which = f"communicator of {work.members}"
        if which in self._made:
            return
        self._made.add(which)
        self.store.set(f"{which}/{self.rank()}", b"")
        try:
            for peer in work.members:
                self.await_key(f"{which}/{peer}", peer, work)
        except RuleBrokenError as error:
            raise RuleBrokenError(
                f"communicators are made by all members at first use: {which} of group "
                f"{self._name}, by {work.name}: {error}"
            ) from error

    def require_alive(self) -> None:
        """Raise if this was aborted."""
        if self.is_aborted:
            raise dist.DistBackendError(f"the communicator of {self._name} was aborted")

    def await_key(self, key: str, peer: int, work: NcclWork) -> None:
        """Return when a peer has come; raises where it has died or will never come."""
        began = time.monotonic()
        while not self.store.check([key]):
            self.require_alive()
            pid = f"pid/{peer}"
            waited_s = time.monotonic() - began
            has_died = self.store.check([pid]) and not is_running(int(self.store.get(pid)))
            if has_died and not self.store.check([key]):  # it may have come in between
                raise _WatchdogError(f"watchdog: rank {peer} has died in {work.name}")
            if waited_s >= self._limit_s:
                raise _WatchdogError(f"watchdog: {work.name} waits for rank {peer}")
            if waited_s >= self.stuck_s:
                behind = [w.name for w in PENDING if w is not work and not w.done.is_set()]
                NcclRules.broken = RuleBrokenError(
                    f"a queue is done in order: on rank {self.rank()} {work.name} waits for rank "
                    f"{peer}; others in the device's queues: {behind}"
                )
                raise NcclRules.broken
            time.sleep(_POLL_S)
        self.require_alive()


def _run_all(queue: SimpleQueue[NcclWork]) -> None:
    while True:
        queue.get().run()


def _fill(memory: Any, found: Sequence[bytes]) -> None:
    for each, content in zip(memory, found, strict=False):
        each.copy_(_typed(content, each))


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
                gloo = gloo_group(store, options.group_rank, options.group_size, options.timeout)
            return NcclRules(options, gloo)

        dist.Backend.register_backend(_BACKEND, create, extended_api=True, devices=["cuda"])
        group, store = make(size, rank, ranks, dist.Backend(_BACKEND), *args, **kw)
        if group in _c10d._world.pg_map:
            _c10d._world.pg_map[group] = (backend, store)
            _c10d._world.pg_backend_config[group] = asked if ":" in asked else "cuda:nccl"
        return group, store

    def batch(operations: list[dist.P2POp]) -> list[Any]:
        group: Any = operations[0].group
        if not isinstance(group, NcclRules) or not isinstance(operations[0].tensor, CudaTensor):
            return plain_batch(operations)
        return [group.messages([(e.op is dist.isend, e.tensor, e.group_peer) for e in operations])]

    _c10d._new_process_group_helper = make_group
    _c10d.batch_isend_irecv = batch
    vars(dist)["batch_isend_irecv"] = batch


def use_nccl(*, separate_queues: bool = False) -> None:
    """Use NCCL itself where there is a GPU, which ranks share if there are too few; else its rules.

    NCCL refuses two ranks of one host on one GPU. With host ids of their own they are on different
    hosts to it, and talk over sockets.
    """
    if not torch.cuda.is_available():
        play_nccl(separate_queues=separate_queues)
        return
    rank, num_gpus = int(os.environ["RANK"]), torch.cuda.device_count()
    torch.cuda.set_device(rank % num_gpus)
    os.environ |= {"NCCL_HOSTID": f"host{rank // num_gpus}", "NCCL_SOCKET_IFNAME": "lo"}


def join_nccl(backend: str = "nccl", *, separate_queues: bool = False) -> None:
    """Make a world over NCCL in place of the gloo world of tests' ranks. Collective."""
    use_nccl(separate_queues=separate_queues)
    store = PrefixStore("nccl", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
