"""metadata.json holds Megatron-Core's four fields, and nothing else parses."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.core import CheckpointingConfig

from dist_ckpt_strategies.formats.marker import CheckpointMarker

markers = st.builds(CheckpointMarker, st.text(), st.integers(), st.text(), st.integers())
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(markers)
def test_a_marker_is_read_back(marker: CheckpointMarker) -> None:
    assert CheckpointMarker.from_json(marker.to_json()) == marker


def test_the_fields_are_those_of_megatron() -> None:
    marker = CheckpointMarker("zarr")
    theirs = CheckpointingConfig("zarr")

    assert json.loads(marker.to_json()) == asdict(theirs)
    assert CheckpointingConfig(**json.loads(marker.to_json())) == theirs


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b'{"common_backend": "torch"}',
        b'{"sharded_backend": null}',
        b'{"sharded_backend": "zarr", "sharded_backend_version": "1"}',
        b'{"sharded_backend": "zarr", "sharded_backend_version": true}',
        b'{"sharded_backend": "zarr", "sharded_backend_version": 1.0}',
        b'{"sharded_backend": "zarr", "extra": 1}',
        b'{"sharded_backend": "zarr"}{',
    ],
)
def test_what_is_not_exactly_a_marker_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        CheckpointMarker.from_json(content)


@given(json_values)
def test_any_json_is_a_marker_or_a_value_error(value: object) -> None:
    content = json.dumps(value).encode()
    try:
        marker = CheckpointMarker.from_json(content)
    except ValueError:
        return
    assert isinstance(value, dict)
    assert set(value) <= set(asdict(marker))
