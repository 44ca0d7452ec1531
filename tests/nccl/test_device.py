"""Copies on a played CUDA device: threads with a device of their own, and pinned memory."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt_strategies.device import HostSnapshot, to_host
from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper
from dist_ckpt_strategies.local import BasicTensorAwareStateDict, LocalCheckpointManager
from tests.support.played_cuda import CONTEXTS, Runtime, play_cuda
from tests.support.ranks import run_processes
from tests.support.restarts import Wrappers, run_restartable

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA itself"),
]


def save_on_the_second_gpu(_rank: int, root: str) -> Any:
    """Threads of the save copy; a thread begins with the first GPU."""
    play_cuda(1)
    state = {"x": torch.full((300,), 2.0, device="cuda"), "y": torch.ones(5, device="cuda")[::2]}
    manager = LocalCheckpointManager(root)
    manager.save(BasicTensorAwareStateDict(state), 1)
    request = manager.save(BasicTensorAwareStateDict(state), 2, is_async=True)
    assert request is not None
    request.wait(60)
    loaded = manager.load()[0].state_dict
    return [sorted(set(loaded[name].tolist())) for name in state], CONTEXTS


def test_threads_that_copy_make_no_context_on_the_first_gpu(tmp_path: Path) -> None:
    (found,) = run_processes(1, save_on_the_second_gpu, str(tmp_path))

    assert found == ([[2.0], [1.0]], {1})


def abort_on_the_second_gpu(_rank: int, wrapper: Wrappers) -> Any:
    play_cuda(1)
    devices: list[int] = []

    def abort(state: Any) -> Any:
        devices.append(torch.cuda.current_device())
        return state

    @wrapper(abort=abort)
    def block(call: HPCallWrapper | None = None) -> None:
        if not devices:
            raise ValueError("on purpose")

    block()
    return devices, CONTEXTS


def test_the_thread_that_aborts_uses_the_gpu_of_its_process() -> None:
    assert run_restartable(1, abort_on_the_second_gpu) == [([1], {1})]


def pin(_rank: int, what: str) -> Any:
    play_cuda(1)
    Runtime.refuses = what == "refused"
    source = torch.full((3 << 20,), 7, dtype=torch.uint8, device="cuda")
    kept = HostSnapshot()
    (copy,) = kept.take([source])
    (staged,) = to_host([source[: 5 << 10]])
    sizes = sorted(Runtime.pinned.values())
    is_equal = bool((copy == 7).all()) and bool((staged == 7).all())
    source.add_(1)  # a kernel, whose check finds an error that was left
    del kept, copy, staged
    gc.collect()
    return is_equal, sizes, dict(Runtime.pinned), CONTEXTS


def test_pinned_memory_has_the_size_that_is_needed_and_is_given_back() -> None:
    assert run_processes(1, pin, "granted") == [(True, [5 << 10, 3 << 20], {}, {1})]


def test_memory_that_cuda_does_not_pin_is_used_and_leaves_no_error() -> None:
    assert run_processes(1, pin, "refused") == [(True, [], {}, {1})]
