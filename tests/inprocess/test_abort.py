"""Abort, finalize and health checks, each for itself."""

import datetime as dt
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_ckpt_strategies.errors import RestartError
from dist_ckpt_strategies.inprocess.abort import (
    AbortTransformerEngine,
    CheckpointlessAbortManager,
    Compose,
    HPAbortTorchDistributed,
    HPCheckpointingAbort,
    HPDataLoaderAbort,
)
from dist_ckpt_strategies.inprocess.finalize import CheckpointlessFinalizeCleanup
from dist_ckpt_strategies.inprocess.health_check import (
    ChainedHealthCheck,
    CudaHealthCheck,
    FaultCounter,
    HPState,
)
from dist_ckpt_strategies.inprocess.rendezvous import Fault, FaultMode

STATE = HPState(rank=1, world_size=4, restart_round=3, attempt=2)


def noting(calls: list[str], name: str, error: Exception | None = None) -> Any:
    def part(state: HPState) -> HPState:
        calls.append(name)
        if error:
            raise error
        return state

    return part


def test_all_parts_are_called_the_last_one_first_and_every_text_is_kept() -> None:
    calls: list[str] = []
    parts = Compose(
        noting(calls, "a", ValueError("first")),
        noting(calls, "b"),
        noting(calls, "c", OSError("2nd")),
    )

    with pytest.raises(RestartError, match="abort failed: OSError: 2nd; ValueError: first"):
        parts(STATE)
    assert calls == ["c", "b", "a"]


def test_buffers_of_transformer_engine_are_destroyed_after_the_communicators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As NVRx, whose abort lists are ported, demands it."""
    calls: list[str] = []
    base = types.ModuleType("transformer_engine.pytorch.module.base")
    vars(base)["destroy_ub"] = lambda: calls.append("buffers")
    monkeypatch.setitem(sys.modules, base.__name__, base)
    default = CheckpointlessAbortManager.get_default_checkpointless_abort()

    CheckpointlessAbortManager.override_abort(
        default, HPAbortTorchDistributed, noting(calls, "communicators")
    )(STATE)

    assert calls == ["communicators", "buffers"]


def test_the_default_has_the_documented_parts_which_are_replaced_in_a_copy() -> None:
    default = CheckpointlessAbortManager.get_default_checkpointless_abort()
    part = noting([], "a")

    assert default(STATE) is default(STATE) is STATE
    assert CheckpointlessAbortManager.create_custom_abort(part).instances == (part,)
    changed = CheckpointlessAbortManager.override_abort(default, HPCheckpointingAbort, part)
    expected = [AbortTransformerEngine, type(part), HPAbortTorchDistributed, HPDataLoaderAbort]
    assert list(map(type, changed.instances)) == expected
    expected[1] = HPCheckpointingAbort
    assert list(map(type, default.instances)) == expected
    with pytest.raises(ValueError, match="expected one or more"):
        CheckpointlessAbortManager.create_custom_abort()
    with pytest.raises(ValueError, match="expected a Compose"):
        CheckpointlessAbortManager.override_abort(part, HPCheckpointingAbort, part)
    with pytest.raises(ValueError, match="HPDataLoaderAbort: expected one of function"):
        CheckpointlessAbortManager.override_abort(Compose(part), HPDataLoaderAbort, part)


def test_cleaning_up_can_be_repeated_and_lets_the_trainer_go() -> None:
    strategy = types.SimpleNamespace(_lightning_module=torch.nn.Linear(2, 2))
    fit_loop = types.SimpleNamespace(_combined_loader=object())
    trainer = types.SimpleNamespace(strategy=strategy, fit_loop=fit_loop)
    finalize = CheckpointlessFinalizeCleanup()
    finalize.register_attributes(trainer)

    assert finalize(STATE) is STATE
    assert finalize(STATE) is STATE
    assert finalize.trainer is None
    assert strategy._lightning_module is fit_loop._combined_loader is None


class FakeCuda:
    def __init__(self, num_devices: int, answer: Callable[[int], Any]) -> None:
        self.is_available = self.is_initialized = lambda: True
        self.device_count = lambda: num_devices
        self.current_device = lambda: 0
        self.synchronize = answer


@pytest.mark.parametrize(
    ("variable", "num_devices", "asked"),
    [("3", 8, 3), ("3", 1, 0), (None, 8, 0)],
    ids=["named", "one device is shown", "not named"],
)
def test_the_device_of_the_local_rank_is_asked(
    variable: str | None, num_devices: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(torch, "cuda", FakeCuda(num_devices, found.append))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if variable is not None:
        monkeypatch.setenv("LOCAL_RANK", variable)

    assert CudaHealthCheck()(STATE) == (STATE, None)
    assert found == [asked]


def test_a_device_that_fails_or_stays_silent_is_not_healthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_device: int) -> None:
        raise RuntimeError("an illegal memory access")

    released = threading.Event()
    monkeypatch.setattr(torch, "cuda", FakeCuda(1, fails))
    with pytest.raises(RestartError, match="CUDA device 0: an illegal memory access"):
        CudaHealthCheck()(STATE)
    monkeypatch.setattr(torch, "cuda", FakeCuda(1, lambda _device: released.wait(100)))
    with pytest.raises(TimeoutError, match=r"CUDA device 0 did not answer within 0\.05 s"):
        CudaHealthCheck(dt.timedelta(seconds=0.05))(STATE)
    released.set()


def fault_of(rank: int) -> HPState:
    fault = Fault(rank, 3, FaultMode.EXCEPTION, "a test")
    return HPState(rank=1, world_size=4, restart_round=3, attempt=2, fault=fault)


def test_only_this_ranks_faults_are_counted() -> None:
    check = ChainedHealthCheck(FaultCounter(max_faults=1))

    check(fault_of(0))
    check(fault_of(1))
    check(fault_of(2))
    with pytest.raises(RestartError, match="rank 1: 2 faults, 1 allowed"):
        check(fault_of(1))


def test_a_process_that_never_used_cuda_passes() -> None:
    cuda: Any = torch.cuda
    error = ValueError("x")

    assert CudaHealthCheck()(STATE, error) == (STATE, error)
    assert not cuda.is_initialized()
