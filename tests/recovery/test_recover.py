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
from tests.support.memory_provider import MemoryProvider
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


Carrier = Callable[[Communicator], Communicator]


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


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except CheckpointError as error:
        return error


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


def test_the_same_tensors_are_not_copied() -> None:
    def body(comm: Communicator) -> int:
        parts = {"a": one_of_everything(1)}
        old = MemoryProvider(parts, step=STEP)
        return recover(comm, MemoryProvider(parts), old)[0].copied_nbytes

    assert run_ranks(2, body) == [0, 0]


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


def test_a_bit_that_flips_on_the_way_is_found_by_the_receiver_and_named_everywhere() -> None:
    def body(comm: Communicator) -> Any:
        old = MemoryProvider({"a": one_of_everything(1)}, step=STEP) if comm.rank else None
        new = MemoryProvider({"a": one_of_everything(2)})
        found: Any = _Flipping(comm) if comm.rank == 0 else comm
        return outcome(lambda: recover(found, new, old))

    errors = run_ranks(3, body)

    assert all(isinstance(error, CorruptCheckpointError) for error in errors)
    assert all(isinstance(error, PeerError) for error in errors[1:])
    assert {error.global_rank for error in errors} == {0}
    assert "a from rank 1 arrived damaged" in str(errors[0])
    assert "from rank" in str(errors[0])


def test_objects_damaged_in_transit_are_found() -> None:
    def body(comm: Communicator) -> Any:
        old = MemoryProvider({}, step=STEP) if comm.rank else None
        found: Any = _Flipping(comm) if comm.rank == 0 else comm
        return outcome(lambda: recover(found, MemoryProvider({}), old))

    errors = run_ranks(2, body)

    assert "from rank 1 arrived damaged" in str(errors[0])
    assert all(isinstance(error, CorruptCheckpointError) for error in errors)


def test_copies_that_differ_in_memory_are_found_where_they_are_compared() -> None:
    def body(comm: Communicator) -> Any:
        tensors = one_of_everything(1)
        if comm.rank == 1:
            tensors["torch.bfloat16"][0, 0] += 1
        old = MemoryProvider({"a": tensors}, step=STEP) if comm.rank else None
        new = MemoryProvider({"a": one_of_everything(2)})
        return outcome(lambda: recover(comm, new, old, compares_copies=True))

    errors = run_ranks(4, body)

    assert all(isinstance(error, CorruptCheckpointError) for error in errors)
    assert all("a: copies differ: " in str(error) for error in errors)
    assert all("on rank 1; " in str(e) and "on ranks 2, 3" in str(e) for e in errors)


@pytest.mark.parametrize(
    ("tensor", "shown"),
    [
        (torch.zeros(2, 2, dtype=torch.bfloat16), "0 (16 bytes) and 1 (8 bytes)"),
        (torch.zeros(4), "0 (16 bytes) and 1 (16 bytes)"),
        (None, "0 (16 bytes) and 1 (0 bytes)"),
    ],
)
def test_a_shard_whose_tensors_differ_is_named_before_any_byte_is_sent(
    tensor: torch.Tensor | None, shown: str
) -> None:
    def body(comm: Communicator) -> Any:
        own = {"x": torch.ones(2, 2)}
        other = {} if tensor is None else {"x": tensor}
        old = MemoryProvider({"a": own}, step=STEP) if comm.rank == 0 else None
        new = MemoryProvider({"a": own if comm.rank == 0 else other})
        return outcome(lambda: recover(comm, new, old))

    for error in run_ranks(2, body):
        assert isinstance(error, ShapeMismatchError)
        assert f"a: tensors differ between ranks {shown}" in str(error)


def test_a_provider_that_raises_on_one_rank_fails_the_recovery_on_all() -> None:
    class Stubborn(MemoryProvider):
        def load_objects(self, objects: Any) -> None:
            raise ValueError("no such schedule")

    def body(comm: Communicator) -> Any:
        kind = Stubborn if comm.rank == 1 else MemoryProvider
        return outcome(lambda: recover(comm, kind({}), MemoryProvider({}, step=STEP)))

    for error in run_ranks(2, body):
        assert isinstance(error, RestartError)
        assert "rank 1: the state provider's load_objects raised ValueError: no such" in str(error)


def test_a_rank_without_memory_for_a_message_keeps_no_rank_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def landing(*_: object) -> torch.Tensor:
        raise MemoryError("no memory to receive into")

    def body(comm: Communicator) -> Any:
        old = MemoryProvider({"a": one_of_everything(1)}, step=STEP) if comm.rank else None
        return outcome(lambda: recover(comm, MemoryProvider({"a": one_of_everything(2)}), old))

    monkeypatch.setattr(FlatShard, "landing", landing)
    found = run_ranks(3, body)

    for error in found:
        assert isinstance(error, CheckpointError)
        assert "rank 0" in str(error)
        assert "no memory to receive into" in str(error)


def test_a_tensor_whose_elements_share_memory_cannot_be_filled() -> None:
    def body(comm: Communicator) -> Any:
        old = MemoryProvider({"a": {"x": torch.ones(3, 2)}}, step=STEP) if comm.rank else None
        shared = torch.zeros(1, 2).expand(3, 2)
        new = MemoryProvider({"a": {"x": torch.zeros(3, 2) if comm.rank else shared}})
        return outcome(lambda: recover(comm, new, old))

    assert all("a: x: its elements share memory" in str(error) for error in run_ranks(2, body))
