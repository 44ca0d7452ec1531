"""States are taken apart and made again, devices and all; classes without a codec are named."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from dist_ckpt_strategies.errors import StrategyError, StrategyExistsError
from dist_ckpt_strategies.local import BasicTensorAwareStateDict, StateCodec, StateCodecs
from dist_ckpt_strategies.local.defaults import default_allowed_names, default_codecs
from dist_ckpt_strategies.local.part_format import PartId, SaveId
from dist_ckpt_strategies.local.retrieve import RetrievedPart
from dist_ckpt_strategies.local.state_codecs import basic_codec, decode_state, encode_state

ID = PartId(SaveId(1, "a"), 0)


def through_codec(state: Any, codecs: StateCodecs) -> Any:
    allowed = default_allowed_names()
    encoded = encode_state(state, ID, world_size=1, session_id="", codecs=codecs, allowed=allowed)
    part = RetrievedPart(encoded.part, tuple(p.clone() for p in encoded.payloads))
    return decode_state(part, codecs=codecs, allowed=allowed)


def test_tensors_of_objects_stay_apart_from_those_of_the_state() -> None:
    value = {"args": argparse.Namespace(t=torch.ones(2)), "w": torch.arange(3), "n": 5}
    found = through_codec(BasicTensorAwareStateDict(value), default_codecs())
    found.restore_tensor_device()

    assert found.state_dict["args"].t.tolist() == [1, 1]
    assert [tensor.tolist() for tensor in found.tensors] == [[0, 1, 2]]


def test_the_device_that_a_tensor_came_from_is_remembered() -> None:
    state = BasicTensorAwareStateDict(
        {"a": torch.ones(1), "b": torch.ones(1)}, devices=["cuda", "cpu"]
    )

    assert through_codec(state, default_codecs()).devices == ["cuda", "cpu"]


class Other:
    """A state that nobody has made known."""


def test_a_class_without_a_codec_is_named() -> None:
    with pytest.raises(StrategyError, match="no codec for a Other"):
        through_codec(Other(), default_codecs())


def test_a_codec_of_ones_own_serves_subclasses_too() -> None:
    class Mine(Other):
        """A state of one's own."""

    codecs = StateCodecs([basic_codec()])
    codecs.add(StateCodec("other", Other, lambda _: {"x": 1}, lambda value, _: value["x"]))

    assert through_codec(Mine(), codecs) == 1
    with pytest.raises(StrategyExistsError, match="'other'"):
        codecs.add(StateCodec("other", Mine, lambda _: None, lambda value, _: value))
    with pytest.raises(StrategyError, match="no codec 'third'"):
        codecs.of_kind("third")
