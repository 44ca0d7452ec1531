"""Tensors leave a state and come back; the caller's containers stay as they are."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.local import BasicTensorAwareStateDict


class Pair(NamedTuple):
    """A tuple with names."""

    left: torch.Tensor
    right: str


def nested() -> dict[str, Any]:
    return {
        "w": torch.arange(4),
        "list": [torch.ones(2), {"x": torch.zeros(1), "n": 5}],
        "pair": Pair(torch.full((3,), 7.0), "text"),
        "ordered": OrderedDict(b=torch.tensor(2), a=1),
    }


def test_tensors_are_found_in_nested_dicts_lists_and_tuples_in_order() -> None:
    state = BasicTensorAwareStateDict(nested())

    assert [tensor.tolist() for tensor in state.tensors] == [
        [0, 1, 2, 3], [1, 1], [0], [7, 7, 7], 2,
    ]  # fmt: skip


def test_what_is_popped_and_inserted_is_the_same_state() -> None:
    before = nested()
    state = BasicTensorAwareStateDict(before)
    state.insert_tensors(state.pop_tensors())

    after = state.state_dict
    assert type(after["ordered"]) is OrderedDict
    assert type(after["pair"]) is Pair
    assert after["w"] is before["w"]
    assert next(iter(state.values())) is before["w"]


def test_the_callers_containers_are_left_as_they_are() -> None:
    before = nested()
    inner = before["list"]
    state = BasicTensorAwareStateDict(before)
    state.pop_tensors()

    assert before["list"] is inner
    assert torch.equal(before["w"], torch.arange(4))


def test_a_dict_of_a_class_of_its_own_stays_one() -> None:
    class Table(dict[str, Any]):
        """A dict whose copy is a plain one."""

    table = Table(a=torch.ones(2), b=1)
    table.note = "x"  # type: ignore[attr-defined]
    counted = Counter("aab")
    found = BasicTensorAwareStateDict({"t": table, "c": counted}).state_dict

    assert (type(found["t"]), found["t"].note) == (Table, "x")
    assert found["t"]["a"] is table["a"]
    assert (type(found["c"]), found["c"]) == (Counter, counted)


def test_a_state_is_hollow_between_pop_and_insert() -> None:
    state = BasicTensorAwareStateDict(nested())
    before = state.is_hollow
    tensors = state.pop_tensors()
    between = state.is_hollow
    state.insert_tensors(tensors)

    assert (before, between, state.is_hollow) == (False, True, False)


def test_a_hollow_state_says_what_to_do() -> None:
    state = BasicTensorAwareStateDict(nested())
    state.pop_tensors()
    for use in (state.pop_tensors, lambda: state.tensors, lambda: state.state_dict):
        with pytest.raises(PlanError, match="insert_tensors"):
            use()
    with pytest.raises(PlanError, match="expected 5 tensors, found 1"):
        state.insert_tensors([torch.zeros(1)])


def test_a_full_state_refuses_tensors() -> None:
    state = BasicTensorAwareStateDict(nested())
    for use in (state.init_tensors, lambda: state.insert_tensors([])):
        with pytest.raises(PlanError, match="pop_tensors"):
            use()


def test_new_tensors_have_the_old_shapes_and_dtypes() -> None:
    state = BasicTensorAwareStateDict(nested())
    old = [(t.shape, t.dtype, t.device) for t in state.pop_tensors()]
    state.init_tensors()

    assert [(t.shape, t.dtype, t.device) for t in state.tensors] == old


def test_copies_on_the_cpu_are_copies() -> None:
    before = nested()
    state = BasicTensorAwareStateDict(before)
    state.copy_tensors_to_cpu()
    before["w"].zero_()
    state.restore_tensor_device()

    assert state.state_dict["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.gpu
def test_cuda_tensors_go_to_the_cpu_and_back() -> None:
    before = {"w": torch.arange(4, device="cuda"), "c": torch.ones(2)}
    state = BasicTensorAwareStateDict(before)
    state.copy_tensors_to_cpu()
    assert [t.device.type for t in state.tensors] == ["cpu", "cpu"]
    state.restore_tensor_device()

    assert [t.device.type for t in state.tensors] == ["cuda", "cpu"]
    assert state.state_dict["w"].tolist() == [0, 1, 2, 3]
