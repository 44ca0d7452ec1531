"""Blocks between ranks: what arrives, and that a failure of one rank is raised by all."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.exchange import Blocks, Incoming, Outgoing, exchange
from dist_ckpt_strategies.comm.tensor_bytes import TensorBytes
from dist_ckpt_strategies.errors import StorageError
from tests.support.entries import outcome
from tests.support.tensors import noise
from tests.support.thread_ranks import run_ranks

Block = tuple[int, int, int]
"""Sender, receiver, size."""


def content(block: Block, number: int) -> torch.Tensor:
    return noise((block[2],), torch.uint8, hash((*block, number)))


def carry(
    comm: Communicator, blocks: Sequence[Block], budget: int, *, fails: str = ""
) -> dict[int, torch.Tensor]:
    """What a rank receives, by the block's number; rank 1 fails in a stage. Collective."""
    targets = {n: torch.zeros(b[2], dtype=torch.uint8) for n, b in enumerate(blocks)}

    def failing(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if fails == stage and comm.rank == 1:
                raise StorageError(f"on purpose in {stage}", key="w")
            return call(*args)

        return run

    def prepare() -> Blocks:
        outgoing, incoming = [], []
        for number, block in enumerate(blocks):
            sender, receiver, nbytes = block
            if sender == comm.rank:
                read = failing("read", TensorBytes([content(block, number)]).read)
                outgoing.append(Outgoing("own", receiver, nbytes, read))
            if receiver == comm.rank:
                target = TensorBytes([targets[number]])
                take = failing("take", target.write)
                landing = failing("landing", lambda *_: None)
                incoming.append(Incoming("other", sender, nbytes, take, landing, "w"))
        return outgoing, incoming

    exchange(
        comm,
        failing("prepare", prepare),
        complete=failing("complete", lambda: None),
        max_inflight_nbytes=budget,
    )
    return {n: target for n, target in targets.items() if blocks[n][1] == comm.rank}


def blocks_of(size: int) -> st.SearchStrategy[list[Block]]:
    ranks = st.integers(0, size - 1)
    return st.lists(st.tuples(ranks, ranks, st.sampled_from([0, 1, 99, 700])), max_size=8)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(1, 4), st.sampled_from([1, 64, 300, 1 << 20]))
@pytest.mark.slow
def test_every_block_arrives_bit_for_bit(data: st.DataObject, size: int, budget: int) -> None:
    blocks = data.draw(blocks_of(size))
    for found in run_ranks(size, lambda comm: carry(comm, blocks, budget + comm.rank)):
        for number, target in found.items():
            assert torch.equal(target, content(blocks[number], number))


@pytest.mark.parametrize("fails", ["prepare", "read", "take", "landing", "complete"])
def test_a_failure_of_one_rank_is_raised_by_all_and_no_rank_waits(fails: str) -> None:
    blocks = [(0, 1, 900), (1, 2, 900), (2, 0, 900), (1, 0, 50)]

    def body(comm: Communicator) -> Any:
        return outcome(partial(carry, comm, blocks, 100, fails=fails))

    for rank, error in enumerate(run_ranks(3, body)):
        assert StorageError.__name__ in error.kinds, error
        assert ("PeerError" in error.kinds) == (rank != 1)
        assert (error.global_rank, error.key) == (1, "w")
        assert f"on purpose in {fails}" in error.text
