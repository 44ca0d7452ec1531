"""Get all ranks to the same step: finish steps, send state, make the weights anew."""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Bytes, Communicator, Receive, Send
from dist_ckpt_strategies.comm.torch_group import is_of_communication
from dist_ckpt_strategies.device import to_host
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    RestartError,
    ShapeMismatchError,
    text_of,
)
from dist_ckpt_strategies.plan.messages import Message
from dist_ckpt_strategies.plan.recover import (
    ByteCopy,
    HeldState,
    PartFacts,
    RankFacts,
    RecoveryPlan,
    Role,
    build_recovery_plan,
    find_layout_conflict,
    require_equal_copies,
)
from dist_ckpt_strategies.run.flat_parts import FlatPart, flat_parts, layout_differences
from dist_ckpt_strategies.run.report import RecoveryReport
from dist_ckpt_strategies.run.state_provider import StateProvider
from dist_ckpt_strategies.spec.phase import Phase

_MIN_MESSAGE_NBYTES = 1 << 20
_MAX_SHOWN = 3

T = TypeVar("T")

RandomStates = Mapping[tuple[int, int], bytes]
"""Encoded random states, by rank and step."""


@dataclass(frozen=True, slots=True)
class RecoveryOptions:
    """How a recovery is carried out.

    Attributes:
        compares_copies: whether all copies of a part have to be equal before any is sent.
        max_bucket_nbytes: bound on what a rank has under way to, or from, all of its peers
            together; a message to each of them may be 1 MiB in any case.
        on_filling: called when the new state is about to be changed; on all ranks, or on none.
    """

    compares_copies: bool = False
    max_bucket_nbytes: int = 64 << 20
    on_filling: Callable[[], None] = lambda: None


DEFAULT_OPTIONS = RecoveryOptions()


@dataclass(frozen=True, slots=True)
class Survivor:
    """What a rank has kept through a fault.

    Attributes:
        provider: of the attempt that ended; its tensors are the source.
        step: that it was in.
        phase: how far it was within it.
        finish_step: finishes that step from the provider's gradients, and notes that it has.
    """

    provider: StateProvider
    step: int
    phase: Phase
    finish_step: Callable[[], None]


class UnfinishedStepError(RestartError):
    """A rank could not finish its step, and its state is torn; others may hold the same parts.

    Raised on all ranks alike, before any state has been moved.
    """


class BrokenGatherError(RestartError):
    """The weights could not be made anew, as ranks lost each other over it: nothing else is wrong.

    Raised on all ranks alike. What each of them has kept is good for another attempt.
    """


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a rank has after a recovery.

    Attributes:
        report: in numbers.
        random_states: those of the target that this rank knows, by rank; its own among them.
    """

    report: RecoveryReport
    random_states: dict[int, bytes]


def gather_facts(comm: Communicator, describe: Callable[[], RankFacts]) -> tuple[RankFacts, ...]:
    """What every rank has and needs, by rank; all ranks have the same answer.

    Collective.
    """
    answers = agree_and_gather(comm, lambda: _to_wire(describe()))
    return agree(comm, lambda: tuple(map(_from_wire, answers)))


def plan_recovery(
    comm: Communicator, facts: Sequence[RankFacts], parts: Sequence[Mapping[str, FlatPart]]
) -> RecoveryPlan:
    """The plan, or the same error on all ranks; where tensors differ it names them.

    Collective where they differ, which all ranks see alike.

    Args:
        comm: the ranks.
        facts: what ``gather_facts`` gave.
        parts: this rank's own, wanted ones first.
    """
    conflict = find_layout_conflict(facts)
    if conflict is not None:
        _raise_conflict(comm, conflict, parts)
    return build_recovery_plan(facts)


def run_recovery(
    comm: Communicator,
    plan: RecoveryPlan,
    survivor: Survivor | None,
    new: StateProvider,
    random_states: RandomStates,
    options: RecoveryOptions = DEFAULT_OPTIONS,
) -> Recovered:
    """Carry out a plan: afterwards ``new`` has the state of the target on every rank.

    Collective: either every rank returns, or every rank raises, and then the state of ``new`` is
    good for nothing on ranks that were to receive. What ``survivor`` has is only changed by
    finishing its step.

    Args:
        comm: the ranks of the plan.
        plan: equal on all of them.
        survivor: what this rank has kept; None if nothing.
        new: what is to be filled; it may have the survivor's tensors, or be the same object.
        random_states: that this rank knows.
        options: equal on all ranks.

    Raises:
        UnfinishedStepError: a rank could not finish its step; another plan may do without it.
        BrokenGatherError: ranks lost each other while they made the weights anew.
        CorruptCheckpointError: bytes arrived damaged, or copies of a part differ.
    """
    started = time.monotonic()
    role = plan.roles[comm.rank]
    if any(one is Role.ROLL_FORWARD for one in plan.roles):
        _finish_steps(comm, survivor, role)
    sources = agree(comm, lambda: _sources(survivor, role))
    if options.compares_copies:
        _compare_copies(comm, plan, sources)
    targets = agree(comm, lambda: flat_parts(_asked("parts", new.parts)))
    transfer = _Transfer(comm, plan, sources, targets, options.max_bucket_nbytes)
    options.on_filling()
    copied_nbytes = agree(comm, transfer.copy_own)
    transfer.run()
    states = _exchange_states(comm, plan, survivor, random_states)
    agree(comm, lambda: _take_objects(new, states.objects, plan.target))
    if plan.needs_gather:
        _gather_weights(comm, new)
    report = RecoveryReport(
        step=plan.target,
        role=role,
        sources=transfer.sources,
        received_nbytes=transfer.received_nbytes,
        sent_nbytes=transfer.sent_nbytes,
        copied_nbytes=copied_nbytes,
        gathered=plan.needs_gather,
        seconds=time.monotonic() - started,
    )
    return Recovered(report, states.random)


def _finish_steps(comm: Communicator, survivor: Survivor | None, role: Role) -> None:
    def finish() -> str:
        try:
            if role is Role.ROLL_FORWARD and survivor is not None:
                _asked("apply_update", survivor.finish_step)
        except CheckpointError as error:
            return str(error)
        return ""

    _raise_if_any(comm, agree_and_gather(comm, finish), UnfinishedStepError)


def _gather_weights(comm: Communicator, new: StateProvider) -> None:
    """Have the weights made anew. Collective."""

    def gather() -> str:
        try:
            _asked("gather_weights", new.gather_weights)
        except CheckpointError as error:
            if is_of_communication(error) or is_of_communication(error.__cause__):
                return str(error)
            raise
        return ""

    _raise_if_any(comm, agree_and_gather(comm, gather), BrokenGatherError)


def _raise_if_any(
    comm: Communicator, answers: Sequence[str], kind: Callable[[str], RestartError]
) -> None:
    failed = [f"rank {comm.global_rank(rank)}: {why}" for rank, why in enumerate(answers) if why]
    if failed:
        raise kind("; ".join(failed[:_MAX_SHOWN]))


def _asked(what: str, call: Callable[[], T]) -> T:
    """What a provider answers; where it raises, an error that all ranks raise alike."""
    try:
        return call()
    except CheckpointError:
        raise
    except Exception as error:  # whatever a training's own code raises
        text = f"the state provider's {what} raised {type(error).__name__}: {text_of(error)}"
        raise RestartError(text) from error


def _sources(survivor: Survivor | None, role: Role) -> dict[str, FlatPart]:
    """Asked for after the roll-forward: an update may put new tensors in the place of old ones."""
    if survivor is None or role is Role.RECEIVE:
        return {}
    return flat_parts(_asked("parts", survivor.provider.parts))


def _compare_copies(
    comm: Communicator, plan: RecoveryPlan, sources: Mapping[str, FlatPart]
) -> None:
    mine = plan.local_parts(comm.rank)
    answers = agree_and_gather(comm, lambda: {name: sources[name].digest() for name in mine})
    digests: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for rank, found in enumerate(answers):
        for part_id, digest in found.items():
            digests[part_id][rank] = digest
    require_equal_copies(digests)


@dataclass(frozen=True, slots=True)
class _Item:
    """A message of a copy, with the rank at the other end."""

    copy: ByteCopy
    message: Message
    peer: int


class _Transfer:
    """The bytes of one rank, in and out, round by round."""

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
        device = self._comm.device
        going = [items[number] for items in self._out.values() if number < len(items)]
        coming = [items[number] for items in self._in.values() if number < len(items)]

        def stage() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            self._require_no_failure()
            try:
                data = [self._from[i.copy.part_id].outgoing(i.message, device) for i in going]
                return data, [self._to[i.copy.part_id].landing(i.message, device) for i in coming]
            except (MemoryError, RuntimeError) as error:  # CUDA's is one of the latter
                raise RestartError(f"no room for messages: {error}") from error

        # Agreed on, as there may be no memory for it on one rank, and nobody is to wait for that.
        data, landing = agree(self._comm, stage)
        exchange = self._comm.begin_exchange(
            [Send(item.peer, found) for item, found in zip(going, data, strict=True)],
            [Receive(item.peer, found) for item, found in zip(coming, landing, strict=True)],
        )
        with self._noting_failures():
            for item, found in zip(going, data, strict=True):
                self._sent[item.peer].append(_digest(found))
        exchange.wait()
        with self._noting_failures():
            for item, found in zip(coming, landing, strict=True):
                self._to[item.copy.part_id].land(item.message, found)
                self._arrived[item.peer].append(_digest(found))

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


@dataclass(frozen=True, slots=True)
class _States:
    objects: Mapping[str, Any]
    random: dict[int, bytes]


def _exchange_states(
    comm: Communicator, plan: RecoveryPlan, survivor: Survivor | None, known: RandomStates
) -> _States:
    """Objects and random states, from whoever the plan names. Collective."""
    held: list[bytes] = []

    def describe() -> list[Any]:
        is_source = survivor is not None and plan.roles[comm.rank] is not Role.RECEIVE
        objects = _objects_of(survivor) if survivor and is_source else None
        random = {
            str(rank): base64.b64encode(content).decode()
            for (rank, step), content in sorted(known.items())
            if step == plan.target
        }
        held.append(json.dumps([objects, random]).encode())
        return [len(held[0]), xxhash.xxh3_64_hexdigest(held[0])]

    described = agree_and_gather(comm, describe)
    pairs = plan.message_pairs()

    def make_room() -> tuple[Bytes, dict[int, Bytes]]:
        sizes = {s: described[s][0] for s, to in pairs if to == comm.rank}
        mine = np.frombuffer(bytearray(held[0]), np.uint8)
        return mine, {source: np.empty(size, np.uint8) for source, size in sorted(sizes.items())}

    arrived: dict[int, Bytes] = {}
    if pairs:
        content, arrived = agree(comm, make_room)
        comm.exchange(
            [Send(to, content) for source, to in pairs if source == comm.rank],
            [Receive(source, into) for source, into in arrived.items()],
        )

    def decoded() -> _States:
        found = {s: into.tobytes() for s, into in arrived.items()} | {comm.rank: held[0]}
        return _decoded_states(comm, plan, found, described)

    return agree(comm, decoded)


def _objects_of(survivor: Survivor) -> dict[str, Any]:
    return dict(_asked("objects", survivor.provider.objects))


def _decoded_states(
    comm: Communicator,
    plan: RecoveryPlan,
    found: Mapping[int, bytes],
    described: Sequence[Sequence[Any]],
) -> _States:
    decoded: dict[int, Any] = {}
    for source, content in found.items():
        if xxhash.xxh3_64_hexdigest(content) != described[source][1]:
            raise CorruptCheckpointError(
                f"objects and random states from rank {comm.global_rank(source)} arrived damaged"
            )
        decoded[source] = json.loads(content)
    random: dict[int, bytes] = {}
    for source in {plan.random_sources[comm.rank], *decoded}:
        for rank, text in decoded[source][1].items():
            random.setdefault(int(rank), _from_base64(text))
    return _States(decoded[plan.object_sources[comm.rank]][0], random)


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise CorruptCheckpointError(f"random states that are no base64: {error}") from error


def _take_objects(new: StateProvider, objects: Mapping[str, Any], target: int) -> None:
    _asked("load_objects", lambda: new.load_objects(objects))
    _asked("set_step", lambda: new.set_step(target))


def _raise_conflict(
    comm: Communicator, conflict: tuple[str, int, int], parts: Sequence[Mapping[str, FlatPart]]
) -> None:
    """Raise on all ranks, naming the tensors that differ. Collective."""
    part_id, first, second = conflict

    def describe() -> Any:
        found = [known[part_id].lines() for known in parts if part_id in known]
        return found if comm.rank in {first, second} else None

    answers = agree_and_gather(comm, describe)
    pairs = ((answers[first][0], lines) for lines in (*answers[second], *answers[first]))
    differences = next(filter(None, (layout_differences(*pair) for pair in pairs)), [])
    shown = "; ".join(map(str, differences[:_MAX_SHOWN]))
    more = f", and {len(differences) - _MAX_SHOWN} more" if len(differences) > _MAX_SHOWN else ""
    raise ShapeMismatchError(
        f"{part_id}: tensors differ between ranks {comm.global_rank(first)} and "
        f"{comm.global_rank(second)}: {shown}{more}",
        key=part_id,
    )


def _to_wire(facts: RankFacts) -> list[Any]:
    held = facts.held
    return [
        [[p.part_id, p.nbytes, p.layout, p.digest] for p in facts.wanted],
        list(facts.gathered),
        None
        if held is None
        else [
            held.step,
            int(held.phase),
            [[p.part_id, p.nbytes, p.layout, p.digest] for p in held.parts],
        ],
        facts.why,
        [list(pair) for pair in facts.random_states],
    ]


def _from_wire(wire: Sequence[Any]) -> RankFacts:
    wanted, gathered, held, why, random_states = wire
    return RankFacts(
        tuple(PartFacts(*part) for part in wanted),
        tuple(gathered),
        None
        if held is None
        else HeldState(held[0], Phase(held[1]), tuple(PartFacts(*part) for part in held[2])),
        why,
        tuple((rank, step) for rank, step in random_states),
    )
