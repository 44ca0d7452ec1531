"""Tensors of any bits, and tensors whose elements do not simply lie in C order."""

from collections.abc import Callable
from typing import Any

import torch

Layout = Callable[[torch.Tensor], torch.Tensor]
"""Gives a tensor of the same shape and values, laid out in another way."""


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The memory order of the dims reversed."""
    dims = tuple(reversed(range(tensor.ndim)))
    return tensor.permute(dims).contiguous().permute(dims)


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """Gaps between the elements, and an offset in the storage."""
    frame = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1, dtype=tensor.dtype)
    view = frame[..., 1::2]
    view.copy_(tensor)
    return view


def slice_of_larger(tensor: torch.Tensor) -> torch.Tensor:
    """Rows that are contiguous in themselves, inside of longer ones."""
    frame = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)
    view = frame[..., 2:-1]
    view.copy_(tensor)
    return view


def at_an_odd_byte(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, but at an offset in its storage."""
    frame = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    view = frame[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


def needs_grad(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor.clone(), requires_grad=tensor.is_floating_point())


LAYOUTS: dict[str, Layout] = {
    "dense": dense,
    "transposed": transposed,
    "every other element": every_other,
    "slice of a larger tensor": slice_of_larger,
    "at an offset": at_an_odd_byte,
    "parameter": needs_grad,
}


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every kind of bit pattern: NaNs with payloads, infinities, subnormals, negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    content = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return content.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements in C order."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    packed = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    return packed.view(torch.uint8).numpy().tobytes()


class Wrapping(torch.Tensor):
    """A tensor whose elements are another one's, as those of DTensor are."""

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        made: Any = torch.Tensor
        return made._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0])
        raise RuntimeError(f"{func} is not for {types}, {kwargs}")


def released(data: torch.Tensor) -> torch.Tensor:
    """A copy whose memory was let go of, as an offload does: its shape and strides stay."""
    data = data.clone()
    data.untyped_storage().resize_(0)
    return data


def cut_short(data: torch.Tensor) -> torch.Tensor:
    """A view into memory of which a part was let go of."""
    whole = torch.cat([data, data])
    second = whole[len(data) :]
    whole.untyped_storage().resize_(whole.nbytes - 1)
    return second


WITHOUT_MEMORY: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "released": (released, "bytes of storage, 0 are present: its memory was released"),
    "cut short": (cut_short, "are present: its memory was released"),
    "wrapper": (Wrapping, "found Wrapping"),
    "sparse": (torch.Tensor.to_sparse, "sparse"),
    "meta": (lambda t: t.to("meta"), "meta"),
}
"""What makes a tensor that cannot be read or filled, and what the error says of it."""
