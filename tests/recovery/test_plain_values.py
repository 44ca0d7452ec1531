"""State of optimizers, schedules and loops as JSON, and back."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt_strategies.errors import CorruptCheckpointError, PlanError
from dist_ckpt_strategies.recovery.plain_values import from_plain, to_plain

VALUES = [
    None,
    {"a": [1, (2.5, "x")], 3: {}, (1, 2): float("inf")},
    Counter({3: 1, 7: 2}),
    {"best": torch.tensor(1.5), "half": torch.arange(4).bfloat16().reshape(2, 2)},
]


@pytest.mark.parametrize("value", VALUES, ids=["none", "nested", "counter", "tensors"])
def test_state_becomes_json_and_comes_back(value: Any) -> None:
    found = from_plain(to_plain(value))

    assert repr(found) == repr(value)


def test_what_is_no_plain_state_is_refused() -> None:
    with pytest.raises(PlanError, match="object"):
        to_plain([object()])
    with pytest.raises(CorruptCheckpointError, match="strange"):
        from_plain({"strange": 1})
    with pytest.raises(CorruptCheckpointError, match="save"):
        from_plain({"tensor": ["save", [1], ""]})


def test_numbers_of_numpy_become_those_of_python() -> None:
    found = to_plain([np.int64(3), np.float32(0.5), np.bool_(1)])

    assert json.dumps(found) == '{"list": [3, 0.5, true]}'
