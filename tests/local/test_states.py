"""States: plain ones, our sharded class, and Megatron-Core's; in memory, saved and loaded."""

import argparse
import datetime as dt
import pathlib
import random
import signal
from collections import Counter, OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject

from dist_ckpt_strategies.errors import PlanError, UnsafeObjectError
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    LocalCheckpointManager,
    MCoreTensorAwareStateDict,
)
from dist_ckpt_strategies.megatron.types import tensor_aware_class
from tests.local.clique_worlds import described, node_directory, run_threads
from tests.support.tensors import WITHOUT_MEMORY, released


class Unknown:
    """A class that is not allowed."""


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


def megatrons(**common: Any) -> Any:
    return tensor_aware_class()(common={"iteration": 5} | common, sharded_state_dict=sharded())


def saved_and_loaded(*states: Any) -> Any:
    """What one rank loads of the states that as many ranks have saved."""
    with TemporaryDirectory() as root:
        run_threads(
            len(states), lambda node: node.manager(0, node=0).save(states[node.rank], 1), Path(root)
        )
        return LocalCheckpointManager(node_directory(root, 0)).load()[0]


def sharded_fields(state: dict[str, Any]) -> list[Any]:
    """What makes up each ShardedTensor and ShardedObject, in a form that ``==`` can compare."""
    model = state["model"]
    return [described(vars(value)) for value in (model["rows"], *model["layers"], state["rng"])]


def test_every_field_of_megatrons_state_comes_back() -> None:
    before = megatrons(args=[1, "x"])
    found = saved_and_loaded(before)

    assert type(found) is tensor_aware_class()
    assert sharded_fields(found.sharded_state_dict) == sharded_fields(before.sharded_state_dict)
    assert found.common_state_dict == {"iteration": 5, "args": [1, "x"]}
    expected = [tensor.clone() for tensor in found.tensors]
    taken = found.pop_tensors()
    assert found.is_hollow
    found.insert_tensors(taken)
    found.copy_tensors_to_cpu()
    found.restore_tensor_device()
    assert not found.is_hollow
    assert all(map(torch.equal, found.tensors, expected))


def test_parts_of_several_ranks_become_one_state_of_ours() -> None:
    found = saved_and_loaded(megatrons(), megatrons())

    assert type(found) is MCoreTensorAwareStateDict
    assert found.common_state_dict == {"iteration": 5}
    for one in found.sharded_state_dict.values():
        assert sharded_fields(one) == sharded_fields(sharded())


VALUES = [
    {1: "a", "1": "b", (1, 2): "c"}, OrderedDict([("b", 1), ("a", 2)]), {1, 2, 3},
    frozenset({"x"}), torch.Size([2, 3]), slice(1, None, 2), torch.bfloat16,
    torch.device("cuda", 1), pathlib.PosixPath("/a/b"),
    dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC), dt.timedelta(days=-1, microseconds=7),
    1j, np.float64(0.1), np.bool_(1), np.str_("text"), np.arange(3, dtype=np.int16), 1 << 80,
    float("nan"), -0.0, bytearray(b"abc"), b"", signal.Signals.SIGTERM,
    argparse.Namespace(lr=0.1, layers=[1, 2], path=pathlib.PosixPath("/x")),
    random.Random(7).getstate(),
]  # fmt: skip


def test_objects_come_back_equal_and_their_tensors_stay_apart_from_those_of_the_state() -> None:
    value = {"values": VALUES, "args": argparse.Namespace(t=torch.ones(2)), "w": torch.arange(3)}
    found = saved_and_loaded(BasicTensorAwareStateDict(value))

    assert described(found.state_dict["values"]) == described(VALUES)
    assert found.state_dict["args"].t.tolist() == [1, 1]
    assert [tensor.tolist() for tensor in found.tensors] == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        *(
            (BasicTensorAwareStateDict({"m": {"w": make(torch.ones(8, 4))}}), PlanError, r"m\.w: ")
            for make, _ in WITHOUT_MEMORY.values()
        ),
        (megatrons(step=released(torch.ones(2))), PlanError, "local state: .*step: a tensor .2,"),
        (megatrons(mine=Unknown()), UnsafeObjectError, r"test_states\.Unknown"),
    ],
    ids=[*WITHOUT_MEMORY, "common state", "class"],
)
def test_values_that_cannot_be_saved_are_refused_by_name(
    state: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        saved_and_loaded(state)
    if isinstance(state, BasicTensorAwareStateDict):
        with pytest.raises(error, match=words):
            state.copy_tensors_to_cpu()


class Pair(NamedTuple):
    """A tuple with names."""

    left: torch.Tensor
    right: str


class Table(dict[str, Any]):
    """A dict whose copy is a plain one."""

    note = ""


def nested() -> dict[str, Any]:
    table = Table(a=torch.ones(1), b=1)
    table.note = "x"
    return {
        "w": torch.arange(4),
        "list": [torch.ones(2), {"x": torch.zeros(1), "n": 5}],
        "pair": Pair(torch.full((3,), 7.0), "text"),
        "ordered": OrderedDict(b=torch.tensor(2), a=1),
        "table": table,
        "counted": Counter("aab"),
    }


def test_popped_and_inserted_tensors_give_the_same_state_and_leave_the_callers_alone() -> None:
    before = nested()
    inner = before["list"]
    state = BasicTensorAwareStateDict(before)
    tensors = state.pop_tensors()
    assert [tensor.tolist() for tensor in tensors] == [[0, 1, 2, 3], [1, 1], [0], [7, 7, 7], 2, [1]]
    assert before["list"] is inner
    assert torch.equal(before["w"], torch.arange(4))
    state.insert_tensors(tensors)

    after = state.state_dict
    assert (type(after["ordered"]), type(after["pair"])) == (OrderedDict, Pair)
    assert (type(after["table"]), after["table"].note) == (Table, "x")
    assert (type(after["counted"]), after["counted"]) == (Counter, before["counted"])
    assert after["w"] is before["w"]
    assert next(iter(state.values())) is before["w"]
    state.copy_tensors_to_cpu()
    before["w"].zero_()
    state.restore_tensor_device()
    assert state.state_dict["w"].tolist() == [0, 1, 2, 3]


def test_a_hollow_state_says_what_to_do_and_gets_tensors_as_it_had() -> None:
    state = BasicTensorAwareStateDict(nested())
    old = [(t.shape, t.dtype, t.device) for t in state.pop_tensors()]
    assert state.is_hollow
    for use in (state.pop_tensors, lambda: state.tensors, lambda: state.state_dict):
        with pytest.raises(PlanError, match="insert_tensors"):
            use()
    with pytest.raises(PlanError, match="expected 6 tensors, found 1"):
        state.insert_tensors([torch.zeros(1)])
    state.init_tensors()
    assert [(t.shape, t.dtype, t.device) for t in state.tensors] == old
    for use in (state.init_tensors, lambda: state.insert_tensors([])):
        with pytest.raises(PlanError, match="pop_tensors"):
            use()


@pytest.mark.gpu
def test_cuda_tensors_go_to_the_cpu_and_back() -> None:
    before = {"w": torch.arange(4, device="cuda"), "c": torch.ones(2)}
    state = BasicTensorAwareStateDict(before)
    state.copy_tensors_to_cpu()
    assert [t.device.type for t in state.tensors] == ["cpu", "cpu"]
    state.restore_tensor_device()

    assert [t.device.type for t in state.tensors] == ["cuda", "cpu"]
    assert state.state_dict["w"].tolist() == [0, 1, 2, 3]


class OwnState(BasicTensorAwareStateDict):
    """A user's class of states."""


def test_a_class_that_is_not_allowed_is_refused_and_left_whole(tmp_path: Path) -> None:
    state, manager = OwnState({"w": torch.ones(2)}), LocalCheckpointManager(tmp_path)
    with pytest.raises(UnsafeObjectError, match=r"test_states\.OwnState"):
        manager.save(state, 5)
    assert not state.is_hollow
    manager = LocalCheckpointManager(tmp_path, allow=[OwnState])
    manager.save(state, 5)
    assert type(manager.load()[0]) is OwnState
