"""State that goes from rank to rank: what arrives, what is found out, and what is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from dist_ckpt_strategies.comm.base import Communicator, Receive, Send
from dist_ckpt_strategies.core.report import RecoveryReport
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    PeerError,
    RestartError,
    ShapeMismatchError,
)
from dist_ckpt_strategies.recovery.plan import Phase
from dist_ckpt_strategies.recovery.provider import (
    FlatShard,
    InMemoryCheckpoint,
    MemoryChecksumManager,
)
from dist_ckpt_strategies.recovery.recover import Recovery
from tests.support.memory_provider import MemoryProvider, Parts
from tests.support.tensors import LAYOUTS, bits
from tests.support.thread_ranks import run_ranks

STEP = 3
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
ALL_KNOWN = {(rank, step): b"%d at %d" % (rank, step) for rank in range(4) for step in range(6)}


def filled(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of random numbers that the dtype can hold."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 2 if dtype is torch.bool else 100, tuple(shape), generator=generator)
    return numbers.to(dtype)


def one_of_everything(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of all dtypes and layouts, empty ones and a scalar among them."""
    tensors = {str(dtype): filled((3, 7), dtype, seed) for dtype in DTYPES}
    for name, layout in LAYOUTS.items():
        tensors[name] = layout(filled((4, 6), torch.float32, seed))
        tensors[f"{name} in bfloat16"] = layout(filled((4, 6), torch.bfloat16, seed))
    tensors["scalar"] = torch.tensor(float(seed))
    tensors["empty"] = torch.empty(0, 5, dtype=torch.bfloat16)
    tensors["large"] = filled((700_000,), torch.float32, seed)
    return tensors


def recover(
    comm: Communicator,
    new: MemoryProvider,
    old: MemoryProvider | None,
    phase: Phase = Phase.RUNNING,
    *,
    compares_copies: bool = False,
) -> tuple[RecoveryReport, dict[int, bytes]]:
    """Plan and run, as the manager does it; the report, and the random states that are received."""
    recovery = Recovery(
        comm,
        new,
        InMemoryCheckpoint(old, STEP, phase) if old else None,
        random_states=ALL_KNOWN if old else {},
        checksums=MemoryChecksumManager() if compares_copies else None,
    )
    received: dict[int, bytes] = {}
    report = recovery.run(
        recovery.plan(),
        old.apply_update if old else lambda: None,
        lambda _step, random_states: received.update(random_states),
    )
    return report, received


@pytest.mark.parametrize("num_holders", [1, 2, 3])
def test_every_dtype_and_layout_arrives_bit_for_bit(num_holders: int) -> None:
    def body(comm: Communicator) -> tuple[RecoveryReport, dict[int, bytes], MemoryProvider]:
        is_holder = comm.rank < num_holders
        old = MemoryProvider({"a": one_of_everything(1)}, step=STEP) if is_holder else None
        new = MemoryProvider({"a": one_of_everything(2)})
        return *recover(comm, new, old), new

    expected = one_of_everything(1)
    for rank, (report, random_states, new) in enumerate(run_ranks(num_holders + 1, body)):
        found = new.parts()["a"]
        assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in expected.items()}
        assert (new.step, new.objects()) == (STEP, {"step": STEP})
        if rank == num_holders:
            assert report.sources == (0,)
            assert report.received_nbytes == sum(t.nbytes for t in expected.values())
            # Its own, and those of the rank that sent them.
            assert random_states == {r: b"%d at %d" % (r, STEP) for r in (0, rank)}
        else:
            assert random_states == {}
            assert report.copied_nbytes == sum(t.nbytes for t in expected.values())


def test_a_laggard_finishes_its_step_and_all_gather() -> None:
    def body(comm: Communicator) -> tuple[str, float, int, int, Any]:
        parts = {"shard": {"x": torch.full((3,), float(comm.rank == 0))}}
        phase = (Phase.UPDATED, Phase.COMMITTED, Phase.GRADS_FINAL, Phase.RUNNING)[comm.rank]
        old = MemoryProvider(parts, step=STEP, gathered=frozenset({"w"}))
        new = MemoryProvider({"shard": {"x": torch.zeros(3)}}, gathered=frozenset({"w"}))
        if phase is Phase.UPDATED:
            old.load_objects({"step": STEP + 1})
        report, _ = recover(comm, new, old, phase)
        value = float(new.parts()["shard"]["x"][0])
        return report.role, value, new.step, new.num_gathers, new.objects()["step"]

    after = (1.0, STEP + 1, 1, STEP + 1)
    assert run_ranks(4, body) == [
        ("keep", *after),
        ("finish step", *after),
        ("finish step", *after),
        ("receive", *after),
    ]


class _Flipping:
    """A communicator that changes one bit of what its rank receives first."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._is_done = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        self._comm.exchange(sends, receives)
        for receive in receives[-1:]:
            torch.as_tensor(receive.into)[-1] ^= not self._is_done
            self._is_done = True


def errors_of(
    old: Callable[[int], Parts | None],
    new: Callable[[int], Parts],
    *,
    flips: bool = False,
    compares_copies: bool = False,
    kind: type[MemoryProvider] = MemoryProvider,
) -> list[Any]:
    """What each of three ranks raises; the first is the one that receives, or is ``kind``."""

    def body(comm: Communicator) -> Any:
        held = old(comm.rank)
        carrier: Any = _Flipping(comm) if flips and comm.rank == 0 else comm
        wanted = (MemoryProvider if comm.rank else kind)(new(comm.rank))
        kept = None if held is None else MemoryProvider(held, step=STEP)
        try:
            return recover(carrier, wanted, kept, compares_copies=compares_copies)
        except CheckpointError as error:
            return error

    return run_ranks(3, body)


def all_of(rank: int) -> Parts | None:
    """But for rank 0, which receives."""
    return {"a": one_of_everything(1)} if rank else None


@pytest.mark.parametrize("parts", [{}, {"a": one_of_everything(1)}], ids=["objects", "a"])
def test_a_bit_that_flips_on_the_way_is_found_by_the_receiver_and_named_everywhere(
    parts: Parts,
) -> None:
    errors = errors_of(lambda rank: parts if rank else None, lambda _: parts, flips=True)

    assert all(isinstance(error, CorruptCheckpointError) for error in errors)
    assert all(isinstance(error, PeerError) for error in errors[1:])
    assert {error.global_rank for error in errors} == {0}
    assert "from rank 1 arrived damaged" in str(errors[0])


def test_copies_that_differ_in_memory_are_found_where_they_are_compared() -> None:
    def differing(rank: int) -> Parts | None:
        found = all_of(rank)
        if rank == 1 and found:
            found["a"]["torch.bfloat16"][0, 0] += 1
        return found

    for error in errors_of(differing, lambda _: {"a": one_of_everything(2)}, compares_copies=True):
        assert isinstance(error, CorruptCheckpointError)
        assert "a: copies differ: " in str(error)
        assert "on rank 1; " in str(error)
        assert "on rank 2" in str(error)


@pytest.mark.parametrize(
    ("tensor", "shown"),
    [
        (torch.zeros(2, 2, dtype=torch.bfloat16), "(8 bytes)"),
        (torch.zeros(4), "(16 bytes)"),
        (None, "(0 bytes)"),
    ],
)
def test_a_shard_whose_tensors_differ_is_named_before_any_byte_is_sent(
    tensor: torch.Tensor | None, shown: str
) -> None:
    own = {"a": {"x": torch.ones(2, 2)}}
    other: Parts = {"a": {} if tensor is None else {"x": tensor}}
    for error in errors_of(lambda rank: own if rank else None, lambda rank: own if rank else other):
        assert isinstance(error, ShapeMismatchError)
        assert f"a: tensors differ between ranks 0 {shown} and 1 (16 bytes)" in str(error)


class Stubborn(MemoryProvider):
    def load_objects(self, objects: Any) -> None:
        raise ValueError("no such schedule")


def no_room(*_: object) -> torch.Tensor:
    raise MemoryError("no memory to receive into")


def test_what_fails_on_one_rank_fails_on_all_and_keeps_no_rank_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = {"a": {"x": torch.zeros(1, 2).expand(3, 2)}}
    plain = {"a": {"x": torch.ones(3, 2)}}

    def held(rank: int) -> Parts | None:
        return plain if rank else None

    for error in errors_of(held, lambda rank: plain if rank else shared):
        assert "a: x: its elements share memory" in str(error)
    for error in errors_of(lambda _: {}, lambda _: {}, kind=Stubborn):
        assert isinstance(error, RestartError)
        assert "rank 0: the state provider's load_objects raised ValueError: no such" in str(error)
    monkeypatch.setattr(FlatShard, "landing", no_room)
    for error in errors_of(held, lambda _: {"a": {"x": torch.zeros(3, 2)}}):
        assert "rank 0" in str(error)
        assert "no memory to receive into" in str(error)
