"""Views of host memory are the memory itself, and staging happens only where it must."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.device import (
    as_bytes,
    copy_into,
    host_buffer,
    host_view,
    may_overlap,
    require_plain,
    to_host,
    torch_dtype,
)
from dist_ckpt_strategies.errors import PlanError
from tests.support.samples import random_values
from tests.support.tensors import (
    bits,
)

EVERY_DTYPE = pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)


def tensor_of(dtype: DType, shape: tuple[int, ...] = (4, 6)) -> torch.Tensor:
    raw = torch.from_numpy(random_values(shape, dtype).view(np.uint8).copy())
    return raw.view(torch_dtype(dtype))


def test_a_type_that_cannot_be_stored_is_refused_naming_the_key() -> None:
    with pytest.raises(PlanError, match=r"^w: dtype torch\.bits8"):
        DType.named(str(torch.bits8), key="w")


def test_only_what_does_not_lie_in_order_is_copied() -> None:
    dense = torch.arange(6.0).reshape(2, 3)
    tensors = [dense, dense[1:], dense.T, dense[:, ::2], torch.nn.Parameter(dense.clone())]
    hosts = to_host(tensors)

    copied = [
        host.__array_interface__["data"][0] != tensor.data_ptr()
        for host, tensor in zip(hosts, tensors, strict=True)
    ]
    assert copied == [False, False, True, True, False]
    assert all(host.flags.c_contiguous for host in hosts)
    assert [host.tobytes() for host in hosts] == [bits(tensor) for tensor in tensors]


@pytest.mark.parametrize(
    ("tensor", "overlaps"),
    [
        (torch.zeros(3, 4), False),
        (torch.zeros(3, 4).T, False),
        (torch.zeros(3, 4)[::2, 1::3], False),
        (torch.zeros(()), False),
        (torch.zeros(0, 4), False),
        (torch.zeros(1).expand(1, 1), False),
        (torch.zeros(3, 1).expand(3, 4), True),
        (torch.zeros(4).expand(3, 4), True),
        (torch.zeros(5).as_strided((3, 3), (1, 1)), True),
    ],
)
def test_memory_that_two_elements_share_is_noticed(tensor: torch.Tensor, overlaps: bool) -> None:
    assert may_overlap(tensor) is overlaps


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 2).to_sparse(),
        torch.empty(2, 2, device="meta"),
    ],
    ids=["sparse", "meta"],
)
def test_a_tensor_without_memory_of_its_own_is_refused_naming_the_key(
    tensor: torch.Tensor,
) -> None:
    with pytest.raises(PlanError, match=r"^w: expected a dense tensor"):
        require_plain(tensor, key="w")


@pytest.mark.gpu
@EVERY_DTYPE
def test_cuda_tensors_are_copied_into_pinned_memory(dtype: DType) -> None:
    tensors = [tensor_of(dtype).cuda(), tensor_of(dtype).cuda().T]
    hosts = to_host(tensors)

    assert [host.tobytes() for host in hosts] == [bits(tensor) for tensor in tensors]
    assert host_buffer((2,), dtype, like=tensors[0]).is_pinned()


@pytest.mark.gpu
def test_cuda_targets_are_filled_before_the_copy_returns() -> None:
    target = torch.zeros(1 << 20, device="cuda")
    buffer = host_buffer((1 << 20,), DType.FLOAT32, like=target)
    buffer.fill_(3.0)
    copy_into([target], [buffer])
    buffer.fill_(4.0)

    assert bool((target == 3.0).all())


@EVERY_DTYPE
def test_bytes_are_the_memory_whatever_the_strides_of_dims_of_one(dtype: DType) -> None:
    tensor = tensor_of(dtype).t()[:1, :1].squeeze(0)  # one element, stride 6

    assert tensor.is_contiguous()
    assert as_bytes(tensor).numpy().tobytes() == host_view(tensor).tobytes()
    assert as_bytes(tensor).data_ptr() == tensor.data_ptr()
    assert as_bytes(tensor[0]).numel() == dtype.itemsize
