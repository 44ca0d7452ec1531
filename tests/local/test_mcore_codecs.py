"""Sharded state dicts in files: our class and Megatron-Core's, which needs no NVRx for that."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject

from dist_ckpt_strategies.errors import CorruptCheckpointError, PlanError, UnsafeObjectError
from dist_ckpt_strategies.local import LocalCheckpointManager, MCoreTensorAwareStateDict
from dist_ckpt_strategies.local.defaults import default_allowed_names, default_codecs
from dist_ckpt_strategies.local.part_format import PartId, SaveId
from dist_ckpt_strategies.local.retrieve import RetrievedPart
from dist_ckpt_strategies.local.state_codecs import decode_parts, encode_state
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


def parts_of(*states: Any, forge: Callable[[Any], Any] = lambda part: part) -> Any:
    """What comes back from the parts of these states, once ``forge`` has been at them."""
    codecs, allowed = default_codecs(), default_allowed_names()
    retrieved = []
    for rank, state in enumerate(states):
        encoded = encode_state(
            state,
            PartId(SaveId(1, "a"), rank),
            world_size=len(states),
            session_id="",
            codecs=codecs,
            allowed=allowed,
        )
        payloads = tuple(payload.clone() for payload in encoded.payloads)
        retrieved.append(RetrievedPart(forge(encoded.part), payloads))
    return decode_parts(retrieved, codecs=codecs, allowed=allowed)


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


def test_a_tensor_remembers_the_device_that_it_came_from() -> None:
    state = megatrons()
    on_device = state.sharded_state_dict["model"]["layers"][0]
    on_device.orig_device = "cuda"  # as copy_tensors_to_cpu leaves it
    model = parts_of(parts_of(state)).sharded_state_dict["model"]

    assert model["layers"][0].orig_device == "cuda"
    assert not hasattr(model["rows"], "orig_device")


def test_parts_of_several_ranks_become_one_state_of_ours() -> None:
    state = megatrons()
    state.sharded_state_dict["model"]["layers"][0].orig_device = "cuda"
    found = parts_of(state, megatrons())

    assert type(found) is MCoreTensorAwareStateDict
    assert found.devices == ["cpu", "cuda", "cpu", "cpu"]
    assert found.common_state_dict == {"iteration": 5}
    first, second = found.sharded_state_dict.values()
    assert described(second) == described(sharded())
    assert [value["key"] for value in described(first)] == ["rows", "ragged", "away", "rng"]


def with_fields(place: str, **fields: Any) -> Callable[[Any], Any]:
    """Forges a part's description of the array ``rows``, or of the object."""

    def forge(part: Any) -> Any:
        content = json.loads(json.dumps(part.content))
        sharded_part = content["sharded"]
        found = sharded_part["rng"] if place == "rng" else sharded_part["model"][place]
        wire = found["value"][0]
        for name, value in fields.items():
            wire[("key", "shape", "offset").index(name)] = {"$": "tuple", "items": value}
        return replace(part, content=content)

    return forge


def with_device(part: Any) -> Any:
    return replace(part, buffers=tuple(replace(one, device="nowhere") for one in part.buffers))


@pytest.mark.parametrize(
    "forge",
    [
        with_fields("rows", shape=[1]),
        with_fields("rows", offset=[0, 0, 0, 0]),
        with_fields("rng", offset=[0]),
        with_device,
    ],
)
@pytest.mark.parametrize("is_megatrons", [True, False], ids=["megatron's", "ours"])
def test_a_description_without_sense_is_an_error_of_ours(
    forge: Callable[[Any], Any], is_megatrons: bool
) -> None:
    state = megatrons() if is_megatrons else MCoreTensorAwareStateDict({}, sharded())

    with pytest.raises(CorruptCheckpointError):
        parts_of(state, forge=forge)


def test_a_hollow_state_is_refused() -> None:
    state = megatrons()
    state.pop_tensors()

    with pytest.raises(PlanError, match="hollow"):
        parts_of(state)


def test_a_flattened_range_is_refused_by_name() -> None:
    state = sharded()
    state["model"]["rows"].flattened_range = slice(0, 3)

    with pytest.raises(PlanError, match="rows: flattened ranges"):
        parts_of(megatrons(state))


@pytest.mark.parametrize("place", ["common", "object"])
def test_an_object_of_an_unknown_class_is_refused_by_name(place: str) -> None:
    state = sharded()
    state["rng"].data = Unknown() if place == "object" else None
    common = {"mine": Unknown()} if place == "common" else {}

    with pytest.raises(UnsafeObjectError, match=r"test_mcore_codecs\.Unknown"):
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
