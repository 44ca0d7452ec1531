"""What is packed is unpacked equal, and nothing else is made or run."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import enum
import io
import json
import os
import pathlib
import random
import signal
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    PlanError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.local.defaults import default_allowed_names
from dist_ckpt_strategies.local.plain_values import Packed, pack, unpack

ALLOWED = default_allowed_names()

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(),
    st.complex_numbers(),
)  # fmt: skip
KEYS = st.one_of(st.text(), st.integers(), st.none(), st.tuples(st.integers(), st.text()))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, inner), st.dictionaries(KEYS, inner),
        st.dictionaries(st.text(), inner),
    ),
    max_leaves=20,
)  # fmt: skip


def through_json(packed: Packed, allowed: Any = ALLOWED) -> Any:
    tree = json.loads(json.dumps(packed.tree, allow_nan=False))
    payloads = [payload.clone() for payload in packed.payloads]
    return unpack(tree, payloads, allowed)


def round_trip(value: Any) -> Any:
    return through_json(pack(value, ALLOWED))


@given(VALUES)
def test_nested_values_come_back_equal_and_of_the_same_types(value: Any) -> None:
    assert repr(round_trip(value)) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        {"$": "tuple", "items": []},
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
        np.float64(0.1),
        np.int8(-3),
        np.bool_(1),
        np.str_("text"),
        1 << 80,
        -(1 << 63),
        float("nan"),
        float("-inf"),
        -0.0,
        bytearray(b"abc"),
        b"",
        signal.Signals.SIGTERM,
        argparse.Namespace(lr=0.1, layers=[1, 2], path=pathlib.PosixPath("/x")),
        random.Random(7).getstate(),
    ],
)
def test_it_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    found = round_trip(value)

    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_a_number_of_many_digits_comes_back() -> None:
    assert round_trip(-(10**5000)) == -(10**5000)


@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int16", "int64", "float16", "bfloat16", "float64", "complex64",
     "float8_e4m3fn"],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_come_back_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    kind = getattr(torch, dtype)
    content = torch.randint(0, 2, (count * kind.itemsize,), dtype=torch.uint8)
    tensor = content.view(kind).reshape(shape) if count else torch.empty(shape, dtype=kind)
    found = round_trip({"a": [tensor]})["a"][0]

    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert found.reshape(-1).view(torch.uint8).equal(content)


@pytest.mark.parametrize("dtype", ["<f8", ">f8", "i4", "?", "u2", "c16"])
def test_arrays_come_back_equal(dtype: str) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    found = round_trip((array, array.T, array[:, :0]))

    for before, after in zip((array, array.T, array[:, :0]), found, strict=True):
        assert after.dtype == before.dtype.newbyteorder("=")
        np.testing.assert_array_equal(after, before)


def test_a_stream_comes_back_with_its_content() -> None:
    assert round_trip(io.BytesIO(b"state")).getvalue() == b"state"


def test_tensors_are_numbered_in_the_order_of_the_value() -> None:
    tensors = [torch.full((n,), n) for n in range(4)]
    packed = pack({"b": tensors[0], "a": [tensors[1], (tensors[2],)], "c": tensors[3]}, ALLOWED)

    assert [p.data_ptr() for p in packed.payloads] == [t.data_ptr() for t in tensors]
    assert [b.name for b in packed.buffers] == ["b", "a.0", "a.1.0", "c"]


class Foreign:
    """A class that nobody has allowed."""

    weight: torch.Tensor


@pytest.mark.parametrize(
    "value", [Foreign(), Foreign, len, open, os.system, lambda: None, iter([])]
)
def test_what_is_not_allowed_is_refused_with_its_place_and_class(value: Any) -> None:
    expected = r"^a\.1: (an object of|the class) .* cannot be stored"
    with pytest.raises(UnsafeObjectError, match=expected) as info:
        pack({"a": [0, value]}, ALLOWED)
    assert info.value.key == "a.1"


def test_an_allowed_class_comes_back_with_its_fields() -> None:
    allowed = default_allowed_names([Foreign])
    value = Foreign()
    value.weight = torch.arange(3)
    found = through_json(pack([value, Foreign], allowed), allowed)

    assert type(found[0]) is Foreign
    assert torch.equal(found[0].weight, value.weight)
    assert found[1] is Foreign


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "global", "name": "os.system"},
        {"$": "object", "class": "subprocess.Popen", "fields": {"args": "true"}},
        {"$": "enum", "class": "builtins.eval", "name": "1"},
    ],
)
def test_a_name_that_is_not_allowed_is_not_looked_up(tree: Any) -> None:
    with pytest.raises(UnsafeObjectError, match="does not hold"):
        unpack(tree, [], ALLOWED)


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "strange"},
        {"$": []},
        {"$": "tensor", "buffer": 3},
        {"$": "tensor"},
        {"$": "dict", "items": [1]},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "dtype", "text": "torch.load"},
        {"$": "numpy", "dtype": "float64", "hex": "00"},
        {"$": "numpy", "dtype": "object", "hex": "00"},
        {"$": "enum", "class": "argparse.Namespace", "name": "x"},
        {"$": "int", "hex": "x"},
        {"$": "tuple", "items": 5},
        {"$": "timedelta", "text": "99999999999999 0 0"},
        {"$": "numpy dtype", "text": "no such"},
        {"$": "object", "class": "argparse.Namespace", "base": "dict", "items": [], "fields": {}},
        {"$": "object", "class": "argparse.Namespace", "base": "eval", "items": [], "fields": {}},
        {"$": "object", "class": "types.SimpleNamespace", "fields": {}},
    ],
)
def test_a_tree_that_pack_does_not_make_is_an_error_of_ours(tree: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="description is damaged"):
        unpack(tree, [], ALLOWED)


def test_what_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(PlanError, match="holds itself"):
        pack(value, ALLOWED)


@pytest.mark.parametrize(
    "tensor", [torch.eye(3).to_sparse(), torch.nested.nested_tensor([torch.ones(2)])]
)
def test_a_sparse_or_nested_tensor_is_refused_by_its_place(tensor: torch.Tensor) -> None:
    with pytest.raises(PlanError, match=r"^a: expected a dense tensor"):
        pack({"a": tensor}, ALLOWED)


class Table(dict[Any, Any]):
    """A dict of a class of its own."""


class Lines(list[Any]):
    """A list of one."""


class Word(str):
    """A text of one."""

    __slots__ = ()


class Outer:
    """What has slots, one of them private, under what has none."""

    __slots__ = ("__hidden", "shown")

    def __init__(self) -> None:
        self.shown, self.__hidden = 1, 2

    def hidden(self) -> int:
        """What nobody else sees."""
        return self.__hidden


class Inner(Outer):
    """What has both."""


class Pick(enum.Flag):
    """Flags that combine."""

    LEFT = 1
    RIGHT = 2


def test_objects_of_classes_that_derive_from_built_in_ones_come_back_as_they_were() -> None:
    table, lines = Table(a=torch.ones(2)), Lines([torch.zeros(1)])
    table.extra = "x"  # type: ignore[attr-defined]
    ordered = collections.OrderedDict(b=1, a=2)
    grown = collections.defaultdict(list, a=[1])
    counted = collections.Counter("aab")
    mixed = Inner()
    mixed.more = 3  # type: ignore[attr-defined]
    value = [table, lines, Word("w"), counted, grown, ordered, mixed, Pick.LEFT]
    classes = [*map(type, value), list]
    allowed = default_allowed_names(classes)

    packed = pack(value, allowed)
    found = through_json(packed, allowed)

    assert list(map(type, found)) == list(map(type, value))
    assert (found[0]["a"].tolist(), found[0].extra) == ([1.0, 1.0], "x")
    assert found[1][0].tolist() == [0.0]
    assert found[2:6] == ["w", counted, grown, ordered]
    assert found[4].default_factory is list
    assert (found[6].shown, found[6].hidden(), found[6].more) == (1, 2, 3)
    assert found[7] is Pick.LEFT
    # Only the table's tensor is one of the state, as BasicTensorAwareStateDict sees it.
    assert [buffer.device for buffer in packed.buffers] == ["cpu", ""]


@pytest.mark.parametrize(
    "value",
    [collections.deque([1]), range(3), decimal.Decimal("1.5"), dt.date(2020, 1, 2), Pick(3)],
    ids=repr,
)
def test_an_allowed_object_that_could_not_be_made_again_is_refused_at_the_save(value: Any) -> None:
    allowed = default_allowed_names([type(value)])

    with pytest.raises(PlanError, match=r"^a\.1: ") as caught:
        pack({"a": [0, value]}, allowed)
    assert caught.value.key == "a.1"


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_what_is_allowed_by_default_comes_back_or_is_refused_at_the_save(name: str) -> None:
    cls = ALLOWED[name]
    if not isinstance(cls, type) or issubclass(cls, np.generic):
        return
    try:
        value = cls()
    except Exception:  # noqa: BLE001 - it cannot be made without parameters
        return
    try:
        packed = pack(value, ALLOWED)
    except CheckpointError:
        return
    found = through_json(packed)
    assert type(found) is cls or (isinstance(found, np.dtype) and found == value)


@pytest.mark.parametrize("dtype", ["float32", "bool", "int64"])
def test_a_dtype_of_numpy_comes_back(dtype: str) -> None:
    assert round_trip([np.dtype(dtype)]) == [np.dtype(dtype)]


@pytest.mark.parametrize("dtype", [">i4", "O", "i4,f8"])
def test_a_dtype_of_numpy_that_is_no_simple_one_is_refused(dtype: str) -> None:
    with pytest.raises(CheckpointError, match=r"^a: "):
        pack({"a": np.dtype(dtype)}, ALLOWED)


class Pair(NamedTuple):
    """A tuple with names."""

    left: torch.Tensor
    right: str


def test_an_allowed_tuple_with_names_comes_back_as_one() -> None:
    allowed = default_allowed_names([Pair])
    found = through_json(pack(Pair(torch.arange(3), "x"), allowed), allowed)

    assert type(found) is Pair
    assert found.left.tolist() == [0, 1, 2]
    with pytest.raises(UnsafeObjectError, match="Pair cannot be stored"):
        pack([Pair(torch.arange(3), "x")], ALLOWED)


def test_tensors_of_objects_have_no_device() -> None:
    packed = pack([argparse.Namespace(t=torch.ones(1)), {"w": torch.ones(2)}], ALLOWED)

    assert [buffer.device for buffer in packed.buffers] == ["", "cpu"]
