"""N ranks as N threads of one process: for tests and benchmarks of what needs no process."""

import json
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from dist_ckpt_strategies.comm.base import Communicator, Message, Parcel
from dist_ckpt_strategies.errors import PeerTimeoutError

T = TypeVar("T")


class ThreadWorld:
    """What the ranks share: a board for messages and a queue for each pair of ranks."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.board = ["null"] * size
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.pipes: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {
            (a, b): queue.Queue() for a in range(size) for b in range(size)
        }


class ThreadCommunicator(Communicator):
    """One rank of a ThreadWorld; see Communicator."""

    def __init__(
        self, world: ThreadWorld, rank: int, global_ranks: Sequence[int] | None = None
    ) -> None:
        super().__init__(range(world.size) if global_ranks is None else global_ranks, rank)
        self._world = world
        self.device = torch.device("cpu")

    def all_gather(self, item: Message, *, follows: bool = False) -> list[Message]:
        self._world.board[self.rank] = json.dumps(item)
        self._meet()
        items = [json.loads(text) for text in self._world.board]
        self._meet()
        return items

    def begin_exchange(
        self, sends: Sequence[Parcel], receives: Sequence[Parcel]
    ) -> Callable[[], None]:
        for to_rank, data in sends:
            sent = data if isinstance(data, torch.Tensor) else data.copy()
            self._world.pipes[self.rank, to_rank].put(torch.as_tensor(sent).clone())
        return partial(self._finish, tuple(receives))

    def _finish(self, receives: Sequence[Parcel]) -> None:
        for from_rank, into in receives:
            pipe = self._world.pipes[from_rank, self.rank]
            try:
                found = pipe.get(timeout=self._world.timeout_s)
            except queue.Empty:
                raise PeerTimeoutError(from_rank, "sent nothing in time") from None
            torch.as_tensor(into).copy_(found)

    def _meet(self) -> None:
        try:
            self._world.barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerTimeoutError(None, "a rank did not reach the collective in time") from None


def run_ranks(
    size: int, body: Callable[[ThreadCommunicator], T], timeout_s: float = 60.0
) -> list[T]:
    """Call ``body`` on every rank at once; the results by rank."""
    world = ThreadWorld(size, timeout_s)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: body(ThreadCommunicator(world, rank)), range(size)))
