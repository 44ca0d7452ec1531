"""States in files: plain ones, our sharded class, and Megatron-Core's, which needs no NVRx."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import pathlib
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject

from dist_ckpt_strategies.errors import (
    PlanError,
    StrategyError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    LocalCheckpointManager,
    MCoreTensorAwareStateDict,
)
from dist_ckpt_strategies.local.encoding import (
    decode_shard,
    default_local_allowed,
    encode_state,
    joined,
)
from dist_ckpt_strategies.local.shard_format import (
    FilledShard,
    LocalShard,
    LocalShardId,
    SaveId,
)
from dist_ckpt_strategies.megatron.types import TENSOR_AWARE_CLASS, tensor_aware_class


class Unknown:
    """A class that nobody has allowed."""


def sharded() -> dict[str, Any]:
    """Every field of a ShardedTensor off its default somewhere, and a tensor that others keep."""
    rows = ShardedTensor.from_rank_offsets(
        "rows", torch.arange(6.0).reshape(2, 3), (1, 1, 4), prepend_axis_num=1, replica_id=(0, 2, 1)
    )
    ragged = ShardedTensor(
        "ragged", torch.ones(3).bfloat16(), torch.bfloat16, (3,), (10,), (7,), None, replica_id=3
    )
    ragged.allow_shape_mismatch = True
    away = ShardedTensor.from_rank_offsets("away", torch.zeros(5), replica_id=1)
    away.data = None
    rng = ShardedObject("rng", {"state": torch.arange(4), "set": {7, 9}}, (2, 4), (1, 3), (0, 1))
    return {"model": {"rows": rows, "layers": [ragged, away]}, "rng": rng}


def megatrons(state: dict[str, Any] | None = None, **common: Any) -> Any:
    held = sharded() if state is None else state
    return tensor_aware_class()(common={"iteration": 5} | common, sharded_state_dict=held)


def parts_of(state: Any) -> Any:
    """What comes back from the shard of this state."""
    allowed = default_local_allowed()
    encoded = encode_state(state, LocalShardId(SaveId(1, "a"), 0), 1, "", allowed)
    payloads = tuple(payload.clone() for payload in encoded.payloads)
    return decode_shard(FilledShard(encoded.shard, payloads), allowed)


def fields_of(value: Any) -> dict[str, Any]:
    """What makes up a ShardedTensor or ShardedObject, in a form that ``==`` can compare."""
    found = dict(vars(value))
    data = found["data"]
    if isinstance(data, torch.Tensor):
        found["data"] = (data.dtype, data.tolist())
    elif isinstance(data, dict):
        found["data"] = (data["state"].tolist(), data["set"])
    return found


def described(state: dict[str, Any]) -> list[dict[str, Any]]:
    model = state["model"]
    return [fields_of(value) for value in (model["rows"], *model["layers"], state["rng"])]


def test_every_field_of_megatrons_state_comes_back() -> None:
    before = megatrons(args=[1, "x"])
    found = parts_of(before)

    assert type(found) is tensor_aware_class()
    assert described(found.sharded_state_dict) == described(before.sharded_state_dict)
    assert found.common_state_dict == {"iteration": 5, "args": [1, "x"]}
    assert not found.is_hollow
    assert [tensor.shape for tensor in found.tensors] == [(2, 3), (3,)]


def test_the_state_is_left_as_it_is() -> None:
    state = megatrons()
    tensors = [tensor.data_ptr() for tensor in state.tensors]
    parts_of(state)

    assert [tensor.data_ptr() for tensor in state.tensors] == tensors


def test_what_was_loaded_can_be_taken_out_and_put_back() -> None:
    found = parts_of(megatrons())
    expected = [tensor.clone() for tensor in found.tensors]
    taken = found.pop_tensors()
    assert found.is_hollow
    found.insert_tensors(taken)
    found.copy_tensors_to_cpu()
    found.restore_tensor_device()

    assert all(map(torch.equal, found.tensors, expected))


def test_states_of_several_ranks_become_one_of_ours() -> None:
    shard = LocalShard(LocalShardId(SaveId(1, "a"), 0), 2, "", "megatron", ())
    found = joined([parts_of(megatrons()), parts_of(megatrons())], shard, 1)

    assert type(found) is MCoreTensorAwareStateDict
    assert found.common_state_dict == {"iteration": 5}
    first, second = found.sharded_state_dict.values()
    assert described(second) == described(sharded())
    assert [value["key"] for value in described(first)] == ["rows", "ragged", "away", "rng"]


@pytest.mark.parametrize(
    "value",
    [
        {1: "a", "1": "b", (1, 2): "c"},
        collections.OrderedDict([("b", 1), ("a", 2)]),
        {1, 2, 3},
        frozenset({"x"}),
        torch.Size([2, 3]),
        slice(1, None, 2),
        torch.bfloat16,
        torch.device("cuda", 1),
        pathlib.PosixPath("/a/b"),
        dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC),
        dt.timedelta(days=-1, microseconds=7),
        1j,
        np.float64(0.1),
        np.bool_(1),
        np.str_("text"),
        np.arange(3, dtype=np.int16),
        1 << 80,
        float("nan"),
        -0.0,
        bytearray(b"abc"),
        b"",
        signal.Signals.SIGTERM,
        argparse.Namespace(lr=0.1, layers=[1, 2], path=pathlib.PosixPath("/x")),
        random.Random(7).getstate(),
    ],
    ids=repr,
)
def test_it_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    found = parts_of(BasicTensorAwareStateDict({"value": value})).state_dict["value"]

    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_tensors_of_objects_stay_apart_from_those_of_the_state() -> None:
    value = {"args": argparse.Namespace(t=torch.ones(2)), "w": torch.arange(3), "n": 5}
    found = parts_of(BasicTensorAwareStateDict(value))

    assert found.state_dict["args"].t.tolist() == [1, 1]
    assert [tensor.tolist() for tensor in found.tensors] == [[0, 1, 2]]


def test_a_class_that_cannot_be_saved_is_named_with_the_one_to_wrap_it_in() -> None:
    with pytest.raises(StrategyError, match=r"a Unknown cannot be saved.*BasicTensorAware"):
        parts_of(Unknown())


def test_a_sparse_tensor_is_refused_by_its_place() -> None:
    with pytest.raises(PlanError, match=r"model\.w"):
        parts_of(BasicTensorAwareStateDict({"model": {"w": torch.eye(2).to_sparse()}}))


def test_a_hollow_state_is_refused() -> None:
    state = megatrons()
    state.pop_tensors()

    with pytest.raises(PlanError, match="hollow"):
        parts_of(state)


@pytest.mark.parametrize("place", ["common", "object"])
def test_an_object_of_an_unknown_class_is_refused_by_name(place: str) -> None:
    state = sharded()
    state["rng"].data = Unknown() if place == "object" else None
    common = {"mine": Unknown()} if place == "common" else {}

    with pytest.raises(UnsafeObjectError, match=r"test_encoding\.Unknown"):
        parts_of(megatrons(state, **common))


def test_a_manager_does_not_import_the_class_before_it_sees_one(tmp_path: Path) -> None:
    module = TENSOR_AWARE_CLASS.rpartition(".")[0]
    script = f"""
import sys
from dist_ckpt_strategies.local import LocalCheckpointManager
LocalCheckpointManager({str(tmp_path)!r})
print(sorted(name for name in sys.modules if name.split(".")[0] == "nvidia_resiliency_ext"
             or name == {module!r}))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )

    assert done.stdout == "[]\n"
    assert LocalCheckpointManager(tmp_path).session_id == ""
