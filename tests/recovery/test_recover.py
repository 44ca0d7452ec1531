"""State that goes from rank to rank: what arrives, what is found out, and what is named."""

from functools import partial
from typing import Any

import pytest
import torch

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.core.report import RecoveryReport
from dist_ckpt_strategies.recovery.plan import Phase
from dist_ckpt_strategies.recovery.provider import InMemoryCheckpoint, MemoryChecksumManager
from dist_ckpt_strategies.recovery.recover import Recovery
from tests.support.entries import outcome
from tests.support.memory_provider import MemoryProvider, Parts
from tests.support.sharding import ALL_DTYPES
from tests.support.tensors import LAYOUTS, bits, noise, released
from tests.support.thread_ranks import run_ranks

STEP = 3
ALL_KNOWN = {(rank, step): b"%d at %d" % (rank, step) for rank in range(4) for step in range(6)}


def one_of_everything(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of all dtypes and layouts, empty ones and a scalar among them."""
    tensors = {str(dtype): noise((3, 7), dtype, seed) for dtype in ALL_DTYPES}
    for name, layout in LAYOUTS.items():
        tensors[name] = layout(noise((4, 6), torch.float32, seed))
        tensors[f"{name} in bfloat16"] = layout(noise((4, 6), torch.bfloat16, seed))
    tensors["conjugated"] = (noise((4, 6), torch.complex64, seed) * (1 + 2j)).conj()
    tensors["scalar"] = torch.tensor(float(seed))
    tensors["empty"] = torch.empty(0, 5, dtype=torch.bfloat16)
    tensors["large"] = noise((700_000,), torch.float32, seed)
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
    kept: Parts, other: Parts | None, wanted: Parts, *, compares_copies: bool = False
) -> list[Any]:
    """What each of three ranks raises: rank 0 wants, 1 and 2 have kept; 1 perhaps the other."""

    def body(comm: Communicator) -> Any:
        held = other if comm.rank == 1 and other is not None else kept
        old = MemoryProvider(held, step=STEP) if comm.rank else None
        new = MemoryProvider(kept if comm.rank else wanted)
        return outcome(partial(recover, comm, new, old, compares_copies=compares_copies))

    return run_ranks(3, body)


def test_copies_that_differ_in_memory_are_found_where_they_are_compared() -> None:
    other = {"a": one_of_everything(1)}
    other["a"]["torch.bfloat16"].view(torch.uint8)[0, 0] ^= 1
    kept, wanted = ({"a": one_of_everything(seed)} for seed in (1, 2))

    for error in errors_of(kept, other, wanted, compares_copies=True):
        assert "CorruptCheckpointError" in error.kinds, error
        assert "a: copies differ: " in error.text
        assert "on rank 1; " in error.text
        assert "on rank 2" in error.text


DIFFER = "a: tensors differ: rank 0 asks for {} bytes, rank 1 asks for 16 bytes; expected"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"x": torch.zeros(2, 2, dtype=torch.bfloat16)}, DIFFER.format(8)),
        ({"x": torch.zeros(4)}, DIFFER.format(16)),
        ({}, DIFFER.format(0)),
        ({"x": torch.zeros(1, 2).expand(2, 2)}, "a: x: its elements share memory"),
        ({"x": released(torch.zeros(2, 2))}, "a: x: a tensor (2, 2) of torch.float32 on cpu needs"),
    ],
)
def test_tensors_that_cannot_be_filled_are_named_before_any_byte_is_sent(
    wanted: dict[str, torch.Tensor], expected: str
) -> None:
    for error in errors_of({"a": {"x": torch.ones(2, 2)}}, None, {"a": wanted}):
        assert error.is_ours, error
        assert "PlanError" in error.kinds, error
        assert expected in error.text
