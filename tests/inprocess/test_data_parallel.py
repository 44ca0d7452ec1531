"""Trainings under torch's DistributedDataParallel are run again in place."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper
from tests.support.restarts import Wrappers, join_group, run_restartable

FAULTY = 0


def one_fault_before_backward(rank: int, wrapper: Wrappers) -> Any:
    """Body of a rank: in the first attempt one raises where the others reduce gradients."""

    @wrapper()
    def block(call: HPCallWrapper) -> tuple[int, int, float]:
        join_group()
        model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
        loss = model(torch.full((2, 3), float(rank))).sum()
        if rank == FAULTY and call.num_attempts == 1:
            raise ValueError("on purpose")
        loss.backward()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        return os.getpid(), call.num_attempts, float(gradient[0, 0])

    return os.getpid(), block()


@pytest.mark.multiprocess
def test_a_rank_that_reduces_its_gradients_lives_on_when_another_raises() -> None:
    results = run_restartable(2, one_fault_before_backward)

    for result in results:
        assert not isinstance(result, Exception), result
        pid, found = result
        assert found == (pid, 2, 1.0)
