"""Tensors of any layout go to storage and back bit for bit, at once, within a memory budget."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.config import Engine, Options
from dist_ckpt_strategies.core.array import ArraySpec, DType
from dist_ckpt_strategies.device import host_view, torch_dtype
from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.sharded.transfer import run_reads, run_writes
from tests.support.memory_store import MemoryArrays
from tests.support.samples import random_values, whole_of
from tests.support.stores import ArrayStore, store_of
from tests.support.tensors import (
    Layout,
    bits,
    every_other,
    lazily_conjugated,
    transposed,
)

OPTIONS = Options(timeout_s=60.0)


def tensor_of(shape: tuple[int, ...], dtype: DType = DType.FLOAT32, seed: int = 0) -> torch.Tensor:
    if 0 in shape:
        return torch.zeros(shape, dtype=torch_dtype(dtype))
    raw = random_values(shape, dtype, seed)
    as_bytes = torch.from_numpy(np.atleast_1d(raw).view(np.uint8).copy())
    return as_bytes.view(torch_dtype(dtype)).reshape(shape)


def array_for(tensor: torch.Tensor, key: str = "w") -> ArraySpec:
    dtype = DType.named(str(tensor.dtype), key=key)
    return ArraySpec(key, tuple(tensor.shape), dtype, tuple(max(1, n) for n in tensor.shape))


def write(store: ArrayStore, tensors: list[torch.Tensor], options: Options = OPTIONS) -> None:
    arrays = [array_for(tensor, f"w{n}") for n, tensor in enumerate(tensors)]
    writes = [(a, whole_of(a), t) for a, t in zip(arrays, tensors, strict=True)]
    store.begin_creates(arrays).wait(options.timeout_s)
    run_writes(store, writes, options)


def read(store: ArrayStore, targets: list[torch.Tensor], options: Options = OPTIONS) -> None:
    arrays = [array_for(target, f"w{n}") for n, target in enumerate(targets)]
    run_reads(
        store,
        [(a, whole_of(a), t) for a, t in zip(arrays, targets, strict=True)],
        options,
    )


# Copies


def test_what_lies_in_order_is_written_from_its_own_memory_all_at_once() -> None:
    store = MemoryArrays()
    sources = [torch.arange(1000.0) + n for n in range(20)]
    write(store, sources, Options(max_inflight_bytes=1))

    (requests,) = store.writes
    for request, source in zip(requests, sources, strict=True):
        assert request.source.__array_interface__["data"][0] == source.data_ptr()


@pytest.mark.parametrize("layout", [transposed, every_other])
def test_targets_of_any_strides_are_read_into_directly_all_at_once(layout: Layout) -> None:
    store = MemoryArrays()
    write(store, [torch.zeros(8, 8) for _ in range(20)])
    targets = [layout(torch.ones(8, 8)) for _ in range(20)]
    read(store, targets, Options(max_inflight_bytes=1))

    (requests,) = store.reads
    for request, target in zip(requests, targets, strict=True):
        assert request.target.__array_interface__["data"][0] == target.data_ptr()


class Watching(MemoryArrays):
    """Notes the bytes of copies that are under way whenever another batch is begun."""

    def peak(self, sources: list[torch.Tensor]) -> int:
        own = {source.data_ptr() for source in sources}
        sizes = [
            sum(
                request.source.nbytes
                for request in batch
                if request.source.__array_interface__["data"][0] not in own
            )
            for batch in self.writes
        ]
        under_way, peak, batches = 0, 0, iter(sizes)
        done = iter(sizes)
        for event in self.events:
            if event == "write begun":
                under_way += next(batches)
                peak = max(peak, under_way)
            elif event == "write done":
                under_way -= next(done)
        return peak


sizes_of_tensors = st.lists(st.integers(1, 40), min_size=1, max_size=25)


@given(sizes_of_tensors, st.integers(1, 400))
def test_copies_take_no_more_than_the_budget_or_twice_the_largest(
    sizes: list[int], budget: int
) -> None:
    store = Watching()
    sources = [every_other(torch.zeros(size, 2)) for size in sizes]
    write(store, sources, Options(max_inflight_bytes=budget))

    largest = max(source.numel() * 4 for source in sources)
    assert store.peak(sources) <= max(budget, 2 * largest)
    assert store.in_flight == []


def test_while_one_batch_is_written_the_next_is_copied() -> None:
    store = MemoryArrays()
    write(store, [every_other(torch.zeros(4, 2)) for _ in range(3)], Options(max_inflight_bytes=64))

    writes = [event.split()[1] for event in store.events if event.startswith("write")]
    assert writes == ["begun", "begun", "done", "begun", "done", "done"]


# Failures


@pytest.mark.parametrize("failing", ["w0", "w1", "w2", "w3"])
def test_after_a_failed_write_no_transfer_is_under_way(failing: str) -> None:
    store = MemoryArrays(fails={failing})
    sources = [every_other(torch.zeros(4, 2)) for _ in range(4)]

    with pytest.raises(StorageError, match=f"^{failing}: told to fail"):
        write(store, sources, Options(max_inflight_bytes=64))
    assert store.in_flight == []


# CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("engine", Engine)
@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_cuda_tensors_of_every_type_and_layout_come_back(
    dtype: DType, engine: Engine, tmp_path: Path
) -> None:
    values = tensor_of((4, 6), dtype)
    write(store_of(tmp_path, engine), [values.cuda(), values.T.contiguous().cuda().T])
    targets = [torch.zeros_like(values).cuda(), torch.zeros_like(values).T.contiguous().cuda().T]
    read(store_of(tmp_path, engine), targets)

    assert all(bits(target) == bits(values) for target in targets)


@pytest.mark.gpu
@given(sizes=sizes_of_tensors, budget=st.integers(1, 400))
def test_copies_of_cuda_tensors_stay_within_the_budget(sizes: list[int], budget: int) -> None:
    store = Watching()
    sources = [torch.arange(2.0 * size, device="cuda") for size in sizes]
    write(store, sources, Options(max_inflight_bytes=budget))
    targets = [torch.zeros(2 * size, device="cuda") for size in sizes]
    read(store, targets, Options(max_inflight_bytes=budget))

    largest = max(source.numel() * 4 for source in sources)
    assert store.peak(sources) <= max(budget, 2 * largest)
    for batch in store.reads:
        assert sum(r.target.nbytes for r in batch) <= max(budget, largest)
    assert all(torch.equal(s, t) for s, t in zip(sources, targets, strict=True))


@pytest.mark.gpu
def test_work_that_is_queued_on_the_current_stream_is_part_of_what_is_written() -> None:
    store = MemoryArrays()
    source = torch.zeros(1 << 20, device="cuda")
    for _ in range(100):
        source += 1
    write(store, [source])

    assert bool((store.arrays["w0"] == 100).all())


@pytest.mark.gpu
def test_work_queued_after_a_read_sees_what_was_read() -> None:
    store = MemoryArrays()
    write(store, [torch.full((1 << 20,), 3.0)])
    target = torch.zeros(1 << 20, device="cuda")
    read(store, [target])

    assert float((target * 2).sum()) == 6.0 * (1 << 20)


@pytest.mark.gpu
def test_a_lazily_conjugated_cuda_tensor_is_written_as_it_is_meant() -> None:
    meant = torch.tensor([1 + 2j, -3.5j], device="cuda")
    store = MemoryArrays()
    write(store, [lazily_conjugated(meant)])

    assert np.array_equal(store.arrays["w0"], host_view(meant.cpu()))
