"""State of optimizers, schedules and loops as JSON, and back."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt_strategies.errors import CorruptCheckpointError, PlanError
from dist_ckpt_strategies.recovery.json_values import from_json_value, to_json_value

VALUES = [
    None,
    {"a": [1, (2.5, "x")], 3: {}, (1, 2): float("inf")},
    Counter({3: 1, 7: 2}),
    {"best": torch.tensor(1.5), "half": torch.arange(4).bfloat16().reshape(2, 2)},
    {"last": Path("/checkpoints/step=3")},
]


@pytest.mark.parametrize("value", VALUES, ids=["none", "nested", "counter", "tensors", "path"])
def test_state_becomes_json_and_comes_back(value: Any) -> None:
    found = from_json_value(to_json_value(value))

    assert repr(found) == repr(value)


def test_what_is_no_plain_state_is_refused() -> None:
    with pytest.raises(PlanError, match="object"):
        to_json_value([object()])
    with pytest.raises(CorruptCheckpointError, match="strange"):
        from_json_value({"strange": 1})
    with pytest.raises(CorruptCheckpointError, match="save"):
        from_json_value({"tensor": ["save", [1], ""]})


@pytest.mark.parametrize(
    "value",
    [
        {"dict": 3},
        {"dict": [], "list": []},
        {"tensor": ["float32", [2], "AAAAAA=="]},
        {"tensor": ["float32", [1], "no base64"]},
        {"path": 3},
    ],
    ids=["no pairs", "two kinds", "too few bytes", "no bytes", "no text"],
)
def test_what_came_damaged_from_a_peer_is_an_error_of_ours(value: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="a value of dict"):
        from_json_value({"list": [value]})


def test_numbers_of_numpy_become_those_of_python() -> None:
    found = to_json_value([np.int64(3), np.float32(0.5), np.bool_(1)])

    assert json.dumps(found) == '{"list": [3, 0.5, true]}'
