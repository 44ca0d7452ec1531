"""The bytes of tensors, as messages take and fill them."""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from dist_ckpt_strategies.device import as_bytes, copy_into, is_in_order, settle


class TensorBytes:
    """The bytes of tensors as one flat range, whatever their dtypes, strides and devices.

    A tensor whose memory is in C order is used where it is. Of others a contiguous copy is made:
    the last one that was read is kept, and those that are filled until ``write_back``. Threads may
    read together, and fill separate ranges together.

    Args:
        tensors: they must not change while they are read. The work that the current streams of
            their devices have queued for them is waited for.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        settle(tensors)  # here, since other threads have other current streams
        self.tensors = [tensor.detach() for tensor in tensors]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        *self._starts, self.nbytes = accumulate(sizes, initial=0)
        self._ends = list(accumulate(sizes))
        self._copies: dict[int, torch.Tensor] = {}
        self._last: tuple[int, torch.Tensor] | None = None
        self._lock = threading.Lock()

    def read(self, start: int, buffer: torch.Tensor) -> torch.Tensor:
        """The bytes from ``start``, as many as ``buffer`` has: where they are, or in the buffer."""
        found = list(self._slices(start, buffer.numel()))
        if len(found) == 1:
            _, own = found[0]
            if own.numel() == buffer.numel() and own.device.type == buffer.device.type:
                settle([own])
                return own
        copy_into([buffer[at : at + own.numel()] for at, own in found], [own for _, own in found])
        return buffer

    def landing(self, start: int, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """Memory that can receive a range; None if it must be received elsewhere and copied."""
        self._keep_copies(start, nbytes)
        found = list(self._slices(start, nbytes))
        is_direct = len(found) == 1 and found[0][1].numel() == nbytes
        return found[0][1] if is_direct and found[0][1].device.type == device.type else None

    def write(self, start: int, content: torch.Tensor) -> None:
        """Fill a range, unless the bytes have been received where they belong."""
        self._keep_copies(start, content.numel())
        found = list(self._slices(start, content.numel()))
        if found and found[0][1].data_ptr() == content[found[0][0] :].data_ptr():
            return
        sources = [content[at : at + own.numel()] for at, own in found]
        copy_into([own for _, own in found], sources)

    def _keep_copies(self, start: int, nbytes: int) -> None:
        """Make the copies in C order that a range is written to."""
        with self._lock:
            for number in self._numbers(start, nbytes):
                if not is_in_order(self.tensors[number]) and number not in self._copies:
                    self._copies[number] = _in_order(self.tensors[number])

    def write_back(self) -> None:
        """Copy what was filled to tensors that are not in C order."""
        copy_into([self.tensors[number] for number in self._copies], list(self._copies.values()))
        self._copies.clear()

    def bytes_of(self, number: int) -> torch.Tensor:
        """The bytes of one tensor, in C order, on its device."""
        tensor = self.tensors[number]
        if is_in_order(tensor):
            return as_bytes(tensor)
        if number in self._copies:
            return as_bytes(self._copies[number])
        last = self._last  # taken once: other threads read other tensors
        if last is None or last[0] != number:
            last = self._last = (number, _in_order(tensor))
        return as_bytes(last[1])

    def _numbers(self, start: int, nbytes: int) -> range:
        """The tensors that share bytes with a range, and perhaps empty ones between them."""
        return range(bisect_right(self._ends, start), bisect_left(self._starts, start + nbytes))

    def _slices(self, start: int, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The bytes of tensors in a range, each with its place in the range."""
        for number in self._numbers(start, nbytes):
            first = max(start, self._starts[number])
            stop = min(start + nbytes, self._ends[number])
            if first < stop:
                own = self.bytes_of(number)
                base = self._starts[number]
                yield first - start, own[first - base : stop - base]


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous()
