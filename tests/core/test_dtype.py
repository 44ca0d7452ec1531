"""Element types mean the same bytes to torch, numpy and us."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.errors import PlanError

EVERY_DTYPE = pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)


@EVERY_DTYPE
def test_the_name_of_the_numpy_and_of_the_torch_type_lead_back(dtype: DType) -> None:
    assert DType.from_numpy(dtype.numpy, key="w") is dtype
    assert DType.named(str(getattr(torch, dtype.value)), key="w") is dtype


@EVERY_DTYPE
def test_torch_and_numpy_read_every_byte_pattern_as_the_same_number(dtype: DType) -> None:
    rng = np.random.default_rng(0)
    raw = np.concatenate([np.arange(256, dtype=np.uint8), rng.integers(0, 256, 1 << 12, np.uint8)])
    if dtype is DType.BOOL:
        raw &= 1
    in_torch = torch.from_numpy(raw).view(getattr(torch, dtype.value))
    in_numpy = raw.view(dtype.numpy)
    if dtype.is_extension:
        in_torch, in_numpy = in_torch.float(), in_numpy.astype(np.float32)

    assert np.array_equal(in_torch.numpy(), in_numpy, equal_nan=in_numpy.dtype.kind in "fc")


def test_the_byte_order_of_a_numpy_type_makes_no_other_type() -> None:
    assert DType.from_numpy(">f4", key="w") is DType.FLOAT32
    assert DType.from_numpy(np.dtype("<i8"), key="w") is DType.INT64


@pytest.mark.parametrize("name", ["torch.quint8", "torch.complex32", "float128", "object", ""])
def test_a_type_that_no_format_holds_is_refused_with_the_key_and_what_can_be_stored(
    name: str,
) -> None:
    with pytest.raises(PlanError, match=r"^layer\.w: dtype .*cannot be stored; bool, ") as caught:
        DType.named(name, key="layer.w")

    assert caught.value.key == "layer.w"
