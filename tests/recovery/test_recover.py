"""State that goes from rank to rank: what arrives, what is found out, and what is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.core.report import RecoveryReport
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    ShapeMismatchError,
)
from dist_ckpt_strategies.recovery.plan import Phase
from dist_ckpt_strategies.recovery.provider import (
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


def errors_of(
    old: Callable[[int], Parts | None],
    new: Callable[[int], Parts],
    *,
    compares_copies: bool = False,
) -> list[Any]:
    """What each of three ranks raises; the first is the one that receives."""

    def body(comm: Communicator) -> Any:
        held = old(comm.rank)
        kept = None if held is None else MemoryProvider(held, step=STEP)
        try:
            return recover(
                comm, MemoryProvider(new(comm.rank)), kept, compares_copies=compares_copies
            )
        except CheckpointError as error:
            return error

    return run_ranks(3, body)


def test_copies_that_differ_in_memory_are_found_where_they_are_compared() -> None:
    def differing(rank: int) -> Parts | None:
        tensors = one_of_everything(1)
        tensors["torch.bfloat16"][0, 0] += rank == 1
        return {"a": tensors} if rank else None

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


def test_a_tensor_whose_elements_share_memory_cannot_be_filled() -> None:
    plain = {"a": {"x": torch.ones(3, 2)}}
    shared = {"a": {"x": torch.zeros(1, 2).expand(3, 2)}}

    for error in errors_of(lambda rank: plain if rank else None, lambda r: plain if r else shared):
        assert "a: x: its elements share memory" in str(error)
