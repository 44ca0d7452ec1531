"""A shard's description survives its trip to another rank."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import DType, ShardSpec, shard_from_wire, shard_to_wire
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.errors import PlanError
from tests.support.boxes import regions_in, shapes, spec_of


@st.composite
def specs(draw: st.DrawFn) -> ShardSpec:
    shape = draw(shapes(max_size=1 << 40))
    return spec_of(
        draw(regions_in(shape)),
        shape,
        key=draw(st.text(min_size=1)),
        dtype=draw(st.sampled_from(DType)),
        is_main=draw(st.booleans()),
        may_mismatch=draw(st.booleans()),
    )


@given(specs())
def test_the_wire_form_is_json_and_gives_the_same_spec_back(spec: ShardSpec) -> None:
    assert shard_from_wire(json.loads(json.dumps(shard_to_wire(spec)))) == spec


def test_an_unknown_dtype_from_a_peer_is_refused() -> None:
    wire = shard_to_wire(spec_of(Region.whole(()), ()))
    wire[4] = "float7"

    with pytest.raises(PlanError, match="float7"):
        shard_from_wire(wire)
