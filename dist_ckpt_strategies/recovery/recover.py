"""Get all ranks to the same step: finish steps, send state, gather the weights.

The ranks talk five times: about what they have (1), about what they are ready to send (2), and
around the exchange, about its memory (3), its digests (4) and its end (5). Where weights are
gathered they talk twice more: about the gather (6), and when the devices have done it (7).
"""

import base64
import logging
import pickle
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from dist_ckpt_strategies.comm.base import Communicator, run_and_gather, run_collectively
from dist_ckpt_strategies.comm.exchange import Blocks, Incoming, Outgoing, exchange
from dist_ckpt_strategies.comm.process_group import is_of_communication
from dist_ckpt_strategies.comm.tensor_bytes import TensorBytes
from dist_ckpt_strategies.core.report import RecoveryReport
from dist_ckpt_strategies.device import await_gpu
from dist_ckpt_strategies.errors import CheckpointError, PeerLostError, RestartError, text_of
from dist_ckpt_strategies.recovery.plan import (
    HeldState,
    RankInput,
    RecoveryPlan,
    Role,
    build_recovery_plan,
    evenly_spaced,
    require_equal_copies,
    require_equal_layouts,
)
from dist_ckpt_strategies.recovery.provider import (
    FlatShard,
    InMemoryCheckpoint,
    MemoryChecksumManager,
    Shards,
    StateProvider,
    dump_objects,
    flat_shards,
    load_objects,
)

logger = logging.getLogger(__name__)

_MAX_SHOWN = 3
_MAX_INFLIGHT_NBYTES = 64 << 20
_MESSAGE = "objects and random states"

T = TypeVar("T")

RandomStates = Mapping[tuple[int, int], bytes]
"""Encoded random states, by global rank and step."""


class UnfinishedStepError(RestartError):
    """A rank could not finish its step: its state is inconsistent, others may hold the same shards.

    Raised on all ranks alike, before any state has been moved.
    """


@dataclass(eq=False, repr=False)
class Recovery:
    """One rank's side of a recovery: what it has and needs, what it sends and receives.

    ``new``, to be filled, may have the tensors of the state in memory, or be the same object. Where
    nothing is ``in_memory``, ``why`` says why, in words. ``random_states`` are those that this rank
    knows; None if the state has none. With ``checksums``, the digests of the in-memory state, it is
    refused if it differs, and all copies of a shard have to be equal. ``shards_of`` gives the
    tensors that are moved, ``gather_timeout_s`` bounds the wait for the GPU to gather weights.
    """

    comm: Communicator
    new: StateProvider
    in_memory: InMemoryCheckpoint | None
    _: KW_ONLY
    why: str = "has no state"
    random_states: RandomStates | None
    checksums: MemoryChecksumManager | None
    shards_of: Callable[[StateProvider], Shards] = lambda provider: provider.parts()
    gather_timeout_s: float = 60.0
    _wanted: dict[str, FlatShard] = field(default_factory=dict, init=False)
    _held: dict[str, FlatShard] = field(default_factory=dict, init=False)
    _copied_nbytes: int = field(default=0, init=False)
    _sent: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    _received: list[torch.Tensor] = field(default_factory=list, init=False)
    """Objects and random states as bytes: for others by rank, and for this rank."""

    def plan(self) -> RecoveryPlan:
        """The plan, or the same error on all ranks.

        Collective: one gather.
        """

        def describe() -> str:
            return base64.b85encode(pickle.dumps(self._input())).decode()

        contents = map(base64.b85decode, run_and_gather(self.comm, describe))  # 1
        inputs = [pickle.loads(content) for content in contents]  # noqa: S301 - of this job
        require_equal_layouts(inputs)
        return build_recovery_plan(inputs)

    def compare(self, plan: RecoveryPlan) -> None:
        """Raise on all ranks alike where copies differ of what is at the target as it is.

        Collective: one gather. Differing copies are a CorruptCheckpointError.
        """
        is_there = plan.roles[self.comm.rank] is Role.KEEP
        found = run_and_gather(
            self.comm, lambda: self._digests(plan) if is_there else {}, follows=True
        )
        require_equal_copies(found)

    def run(
        self,
        plan: RecoveryPlan,
        finish_step: Callable[[], None],
        adopt: Callable[[int, dict[int, bytes]], None],
        *,
        on_filling: Callable[[], None] = lambda: None,
    ) -> RecoveryReport:
        """Carry out a plan: afterwards the new state is that of the target on every rank.

        Collective: either every rank returns, or every rank raises, and then the new state is
        unusable on ranks that were to receive. The in-memory state changes only where its step is
        finished.

        The plan is equal on all ranks. ``finish_step`` finishes the in-memory state's step from its
        gradients, and notes that. ``adopt`` is called at the end with the target, and the random
        states of its beginning that this rank received, by global rank; what it raises, every rank
        raises. ``on_filling`` is called when the new state is about to be changed; on all ranks, or
        on none.

        Raises:
            UnfinishedStepError: see there.
            PeerLostError: ranks lost each other while they gathered the weights, on all ranks
                alike: what each of them has kept is good for another attempt.
            CorruptCheckpointError: bytes arrived damaged, or copies of a shard differ.
        """
        comm, started = self.comm, time.monotonic()
        prepared = run_and_gather(comm, lambda: self._prepared(plan, finish_step))  # 2
        self._raise_if_any([why for why, *_ in prepared], UnfinishedStepError)
        require_equal_copies([digests for *_, digests in prepared])
        on_filling()

        random: dict[int, bytes] = {}

        def complete() -> None:
            random.update(self._complete(plan))
            if not plan.needs_gather:
                adopt(plan.target, random)

        exchange(  # 3, 4, 5
            comm,
            lambda: self._blocks(plan, [dict(sizes) for _, sizes, _ in prepared]),
            complete=complete,
            max_inflight_nbytes=_MAX_INFLIGHT_NBYTES,
        )
        if plan.needs_gather:
            gather = partial(self._lost_over, self.new.gather_weights)
            lost = run_and_gather(comm, gather)  # 6
            self._raise_if_any(lost, partial(PeerLostError, None))

            def end() -> None:  # only now: a rank that has failed would be waited for
                wait = partial(await_gpu, self.gather_timeout_s, "gather of the weights")
                if why := self._lost_over(wait):
                    raise PeerLostError(None, why)
                adopt(plan.target, random)

            run_collectively(comm, end)  # 7
        return self._report(plan, time.monotonic() - started)

    def _input(self) -> RankInput:
        self._wanted = flat_shards(self.shards_of(self.new))
        held, why, checkpoint = None, self.why, self.in_memory
        if checkpoint is not None:
            self._held = flat_shards(self.shards_of(checkpoint.provider))
            damage = checkpoint.damage(self.checksums)
            if damage:
                logger.error("the in-memory state is damaged and not used: %s", "; ".join(damage))
            shards = () if damage else tuple(shard.inputs() for shard in self._held.values())
            held, why = HeldState(checkpoint.step, checkpoint.phase, shards), "".join(damage[:1])
        return RankInput(
            tuple(shard.inputs() for shard in self._wanted.values()),
            tuple(sorted(self.new.gathered_parts())),
            held,
            why,
            self._known_random_states(),
        )

    def _known_random_states(self) -> tuple[tuple[int, range], ...] | None:
        if self.random_states is None:
            return None
        of_comm = {self.comm.global_ranks[rank]: rank for rank in range(self.comm.size)}
        by_step: dict[int, list[int]] = {}
        for global_rank, step in self.random_states:
            if global_rank in of_comm:
                by_step.setdefault(step, []).append(of_comm[global_rank])
        return tuple(
            (step, ranks) for step in sorted(by_step) for ranks in evenly_spaced(by_step[step])
        )

    def _prepared(self, plan: RecoveryPlan, finish_step: Callable[[], None]) -> list[Any]:
        """Why the step is not finished, sizes of the messages, and digests of the shards."""
        rank, role = self.comm.rank, plan.roles[self.comm.rank]
        if role is Role.FINISH_STEP:
            try:
                _asked("apply_update", finish_step)
            except CheckpointError as error:
                return [str(error), [], {}]
        # Asked for after the step is finished: an update may replace tensors by new ones.
        held = None if role is Role.RECEIVE else self.in_memory
        if held is not None and role is Role.FINISH_STEP:
            held = replace(held, begun=None)
        self._held = {} if held is None else self._flat(held.provider)
        self._wanted = self._flat(self.new)
        for copy in plan.copies:
            if copy.receiver == rank:
                self._wanted[copy.shard_id].require_fillable()
        self._make_messages(plan, held)
        sizes = [[receiver, content.numel()] for receiver, content in self._sent.items()]
        return ["", sizes, self._digests(plan) if self.checksums is not None else {}]

    def _make_messages(self, plan: RecoveryPlan, held: InMemoryCheckpoint | None) -> None:
        rank, objects = self.comm.rank, b""
        if held is not None:
            objects = dump_objects(dict(_asked("objects", held.objects)))
        sources = zip(plan.object_sources, plan.random_sources, strict=True)
        for receiver, (object_source, random_source) in enumerate(sources):
            states: dict[int, bytes] = {}
            if random_source == rank != receiver:
                states = self._random_states_for(receiver, plan.target)
            if object_source == rank or states:
                content = pickle.dumps((objects if object_source == rank else b"", states))
                self._sent[receiver] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if rank in self._sent:
            self._received.append(self._sent.pop(rank))

    def _flat(self, provider: StateProvider) -> dict[str, FlatShard]:
        return flat_shards(_asked("parts", lambda: self.shards_of(provider)))

    def _digests(self, plan: RecoveryPlan) -> dict[str, str]:
        """Of this rank's shards at the target, by id."""
        return {name: self._held[name].digest() for name in plan.local_shards(self.comm.rank)}

    def _random_states_for(self, receiver: int, step: int) -> dict[int, bytes]:
        """The receiver's own, and this rank's: should it be lost next, the receiver has them."""
        states = self.random_states or {}
        ranks = (self.comm.global_ranks[rank] for rank in (receiver, self.comm.rank))
        return {rank: states[rank, step] for rank in ranks if (rank, step) in states}

    def _blocks(self, plan: RecoveryPlan, sizes: Sequence[Mapping[int, int]]) -> Blocks:
        """Copy this rank's own shards to the new state; what it sends and receives beside them."""
        rank = self.comm.rank
        for shard_id in plan.local_shards(rank):
            if shard_id in self._wanted:
                self._copied_nbytes += self._wanted[shard_id].copy_from(self._held[shard_id])
        outgoing, incoming, device = [], [], self.comm.device
        for c in plan.copies:
            name = c.shard_id
            if c.source == rank:
                outgoing.append(Outgoing.of(name, c.receiver, self._held[name]))
            if c.receiver == rank:
                incoming.append(Incoming.of(name, c.source, self._wanted[name], device, name))
        for receiver, content in self._sent.items():
            outgoing.append(Outgoing.of(_MESSAGE, receiver, TensorBytes([content])))
        for source in sorted({plan.object_sources[rank], plan.random_sources[rank]} - {rank}):
            memory = torch.empty(sizes[source][rank], dtype=torch.uint8, device="cpu")
            self._received.append(memory)
            incoming.append(Incoming.of(_MESSAGE, source, TensorBytes([memory]), device))
        return outgoing, incoming

    def _complete(self, plan: RecoveryPlan) -> dict[int, bytes]:
        """Complete the new state; returns the random states that this rank received."""
        random: dict[int, bytes] = {}
        for message in self._received:
            content, states = pickle.loads(message.numpy().tobytes())  # noqa: S301 - of this job
            random |= states
            if content:
                _asked("load_objects", partial(self.new.load_objects, load_objects(content)))
        _asked("set_step", lambda: self.new.set_step(plan.target))
        return random

    def _lost_over(self, gather: Callable[[], None]) -> str:
        """Why ranks lost each other over a step of the gather, where they did."""
        try:
            _asked("gather_weights", gather)
        except CheckpointError as error:
            if is_of_communication(error) or is_of_communication(error.__cause__):
                return str(error)
            raise
        return ""

    def _raise_if_any(self, answers: Sequence[str], kind: Callable[[str], CheckpointError]) -> None:
        failed = [
            f"rank {self.comm.global_ranks[r]}: {why}" for r, why in enumerate(answers) if why
        ]
        if failed:
            raise kind("; ".join(failed[:_MAX_SHOWN]))

    def _report(self, plan: RecoveryPlan, seconds: float) -> RecoveryReport:
        rank = self.comm.rank
        received = [copy for copy in plan.copies if copy.receiver == rank]
        return RecoveryReport(
            step=plan.target,
            role=plan.roles[rank],
            sources=tuple(sorted({copy.source for copy in received})),
            received_nbytes=sum(copy.nbytes for copy in received),
            sent_nbytes=sum(copy.nbytes for copy in plan.copies if copy.source == rank),
            copied_nbytes=self._copied_nbytes,
            gathered=plan.needs_gather,
            seconds=seconds,
        )


def _asked(what: str, call: Callable[[], T]) -> T:
    """A provider's answer; if it raises, an error that all ranks raise alike."""
    try:
        return call()
    except CheckpointError:
        raise
    except Exception as error:  # whatever a training's own code raises
        text = f"the state provider's {what} raised {type(error).__name__}: {text_of(error)}"
        logger.warning("%s\n%s", text, traceback.format_exc().rstrip())
        raise RestartError(text) from error
