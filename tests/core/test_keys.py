"""Keys that a directory tree cannot hold are refused before a byte is written."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import require_storable_keys
from dist_ckpt_strategies.errors import PlanError


def require(*arrays: str, objects: tuple[str, ...] = ()) -> None:
    require_storable_keys(arrays, objects)


@pytest.mark.parametrize(
    "key",
    [
        "w",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "chained_0.optimizer/state/exp_avg",
        "a.b/c.d/e",
        "weight.0",
        "0",
        "0.0",
        "key with spaces, % ? * : \" ' \n and ü ✓",
        "common.pt.backup",
        "...",
        ".hidden",
        "x" * 255,
        "/".join(["y" * 200] * 4),
    ],
)
def test_ordinary_and_odd_keys_are_fine(key: str) -> None:
    require(key)
    require(objects=(key,))


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "empty"),
        (".", "component"),
        ("..", "component"),
        ("a/../b", "component"),
        ("a/./b", "component"),
        ("a//b", "component"),
        ("/a", "component"),
        ("a/", "component"),
        ("/", "component"),
        ("a\0b", "NUL"),
        ("a\\b", "backslash"),
        ("w.__lock", "__lock"),
        ("w.__lock/x", "__lock"),
        ("x" * 256, "256 bytes"),
        ("ü" * 128, "256 bytes"),
        ("a/" + "x" * 300 + "/b", "300 bytes"),
        ("\ud800", "UTF-8"),
        ("common.pt", "file of every checkpoint"),
        ("metadata.json", "file of every checkpoint"),
        ("a/metadata.json/w", "file that marks an array"),
        ("optimizer/common.pt", "file that marks an array"),
        ("metadata.json/w", "file of every checkpoint"),
        (".zarray", "file that marks an array"),
        ("a/.zarray", "file that marks an array"),
        ("rng/shard_0_1.pt", "file that marks an array"),
        (".removed-w", "on its way out"),
        ("a/.removed-w", "on its way out"),
        (".partial-w", "on its way out"),
    ],
)
def test_a_key_that_cannot_be_stored_is_refused_saying_why(key: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason) as caught:
        require("fine", key)
    assert caught.value.key == key
    assert repr(key) in str(caught.value)

    with pytest.raises(PlanError, match=reason):
        require("fine", objects=(key,))


@pytest.mark.parametrize("below", ["0", "1.2", ".zarray", ".zattrs", ".zgroup", "0/deeper"])
def test_a_key_in_the_place_of_another_arrays_file_is_refused(below: str) -> None:
    with pytest.raises(PlanError, match=r"file (of|that marks) (the|an) array"):
        require("a/b", f"a/b/{below}")
    with pytest.raises(PlanError, match=r"file (of|that marks) (the|an) array"):
        require("a/b", objects=(f"a/b/{below}",))


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12))
@example("~")
@example("%2e%2e")
def test_every_key_that_is_accepted_names_a_directory_below_the_checkpoint(
    tmp_path: Path, key: str
) -> None:
    try:
        require(key)
    except PlanError:
        return
    root = tmp_path / uuid.uuid4().hex
    (root / key).mkdir(parents=True)

    assert os.path.commonpath([root.resolve(), (root / key).resolve()]) == str(root.resolve())
    assert (root / key).resolve() != root.resolve()
