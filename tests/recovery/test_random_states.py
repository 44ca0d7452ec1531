"""Random states as bytes: what is captured comes back, and other states are refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from dist_ckpt_strategies.errors import CorruptCheckpointError
from dist_ckpt_strategies.recovery.random_states import (
    capture_random_states,
    restore_random_states,
)


class Tracker:
    """As Megatron-Core's, without CUDA."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {"model": torch.arange(16, dtype=torch.uint8)}
        self.states["graph"] = torch.Generator().manual_seed(3)

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states


def test_what_megatron_tracks_continues_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker()
    monkeypatch.setattr(megatron_random, "_CUDA_RNG_STATE_TRACKER", tracker)
    content = pickle.dumps(capture_random_states())
    expected = torch.rand(2, generator=tracker.states["graph"])
    tracker.states["model"] = torch.zeros(16, dtype=torch.uint8)

    restore_random_states(pickle.loads(content))

    assert tracker.states["model"].tolist() == list(range(16))
    assert torch.equal(torch.rand(2, generator=tracker.states["graph"]), expected)


@pytest.mark.parametrize("name", ["python", "numpy", "torch", "dice"])
def test_a_state_that_makes_no_sense_is_refused_by_name(name: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=name):
        restore_random_states([(name, b"x" * 16)])
