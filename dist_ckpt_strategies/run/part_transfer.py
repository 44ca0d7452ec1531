"""The bytes of parts on their way from those that hold them to those that need them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import xxhash

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator, Receive, Send
from dist_ckpt_strategies.device import to_host
from dist_ckpt_strategies.errors import CorruptCheckpointError, RestartError
from dist_ckpt_strategies.plan.messages import Message
from dist_ckpt_strategies.plan.recover import ByteCopy, RecoveryPlan
from dist_ckpt_strategies.run.flat_parts import FlatPart

_MIN_MESSAGE_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Item:
    """A message of a copy, with the rank at the other end."""

    copy: ByteCopy
    message: Message
    peer: int


@dataclass(frozen=True, slots=True)
class _Staged:
    """What goes out and comes in in one round: items with their bytes, and these as messages."""

    going: list[tuple[_Item, torch.Tensor]]
    coming: list[tuple[_Item, torch.Tensor]]
    sends: list[Send]
    receives: list[Receive]


class PartTransfer:
    """The bytes of one rank, in and out, round by round; each message has its digest compared.

    Args:
        comm: the ranks of the plan.
        plan: equal on all of them.
        sources: this rank's parts at the target.
        targets: the parts of its new state.
        max_bucket_nbytes: bound on what is under way to, or from, all peers together; equal on all
            ranks. A message to each of them may be 1 MiB in any case.

    Attributes:
        sources: ranks that this one receives from.
        sent_nbytes: that it sends, all in all.
        received_nbytes: that it receives.
    """

    def __init__(
        self,
        comm: Communicator,
        plan: RecoveryPlan,
        sources: Mapping[str, FlatPart],
        targets: Mapping[str, FlatPart],
        max_bucket_nbytes: int,
    ) -> None:
        self._comm = comm
        self._plan = plan
        self._from = sources
        self._to = targets
        # Sender and receiver cut a copy alike: the bound comes from the plan, and from an argument
        # that is the same on all ranks.
        self._max_nbytes = max(_MIN_MESSAGE_NBYTES, max_bucket_nbytes // max(1, plan.max_peers()))
        self._out: defaultdict[int, list[_Item]] = defaultdict(list)
        self._in: defaultdict[int, list[_Item]] = defaultdict(list)
        self._sent: defaultdict[int, list[str]] = defaultdict(list)
        self._arrived: defaultdict[int, list[str]] = defaultdict(list)
        self._failure: Exception | None = None
        self.sources = tuple(sorted({c.source for c in plan.copies if c.receiver == comm.rank}))
        self.sent_nbytes = sum(c.nbytes for c in plan.copies if c.source == comm.rank)
        self.received_nbytes = sum(c.nbytes for c in plan.copies if c.receiver == comm.rank)

    def copy_own(self) -> int:
        """Copy this rank's own parts over to the new state; bytes copied."""
        copied = 0
        for part_id in self._plan.local_parts(self._comm.rank):
            if part_id in self._to:
                copied += self._to[part_id].copy_from(self._from[part_id])
        return copied

    def run(self) -> None:
        """Carry all the bytes, and compare their digests. Collective."""
        if not self._plan.copies:
            return
        for number in range(max(agree_and_gather(self._comm, self._prepare))):
            self._round(number)
        claimed = agree_and_gather(self._comm, self._claims)
        agree(self._comm, lambda: self._verify(claimed))

    def _prepare(self) -> int:
        rank = self._comm.rank
        for copy in self._plan.copies:
            if copy.source == rank:
                self._add(self._out[copy.receiver], self._from[copy.part_id], copy, copy.receiver)
            if copy.receiver == rank:
                self._to[copy.part_id].require_fillable()
                self._add(self._in[copy.source], self._to[copy.part_id], copy, copy.source)
        return max(map(len, (*self._out.values(), *self._in.values())), default=0)

    def _add(self, items: list[_Item], part: FlatPart, copy: ByteCopy, peer: int) -> None:
        messages = part.messages(copy.start, copy.nbytes, self._max_nbytes)
        items.extend(_Item(copy, message, peer) for message in messages)

    def _round(self, number: int) -> None:
        # Agreed on, as there may be no memory for it on one rank, and nobody is to wait for that.
        staged = agree(self._comm, lambda: self._staged(number))
        exchange = self._comm.begin_exchange(staged.sends, staged.receives)
        with self._noting_failures():
            for item, data in staged.going:
                self._sent[item.peer].append(_digest(data))
        exchange.wait()
        with self._noting_failures():
            for item, landing in staged.coming:
                self._to[item.copy.part_id].land(item.message, landing)
                self._arrived[item.peer].append(_digest(landing))

    def _staged(self, number: int) -> _Staged:
        """The messages of a round, with those that go out in order, and room for the others."""
        self._require_no_failure()
        device = self._comm.device
        out = [items[number] for items in self._out.values() if number < len(items)]
        into = [items[number] for items in self._in.values() if number < len(items)]
        try:
            going = [(i, self._from[i.copy.part_id].outgoing(i.message, device)) for i in out]
            coming = [(i, self._to[i.copy.part_id].landing(i.message, device)) for i in into]
        except (MemoryError, RuntimeError) as error:  # CUDA's is one of the latter
            raise RestartError(f"no room for messages: {error}") from error
        return _Staged(
            going,
            coming,
            [Send(item.peer, data) for item, data in going],
            [Receive(item.peer, landing) for item, landing in coming],
        )

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        """What fails here is raised in the next step that all agree on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised there
            self._failure = self._failure or error

    def _require_no_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _claims(self) -> dict[str, list[str]]:
        """The digests of what this rank has sent, by receiver."""
        self._require_no_failure()
        return {str(to): found for to, found in self._sent.items()}

    def _verify(self, claimed: Sequence[Mapping[str, Sequence[str]]]) -> None:
        for source, items in sorted(self._in.items()):
            expected = claimed[source].get(str(self._comm.rank), ())
            for item, sent, found in zip(items, expected, self._arrived[source], strict=True):
                if sent != found:
                    at = item.message.byte_offset
                    raise CorruptCheckpointError(
                        f"{item.copy.part_id}: bytes {at} to {at + item.message.nbytes} from rank "
                        f"{self._comm.global_rank(source)} have digest {found}, expected {sent}",
                        key=item.copy.part_id,
                    )
        for part in self._to.values():
            part.settle()


def _digest(data: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(to_host([data])[0].data)
