"""NVRx's queue takes the requests of local saves, in its own class and in no other."""

from __future__ import annotations

import queue
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt_strategies.local import BasicTensorAwareStateDict, LocalCheckpointManager
from tests.support.queues import run_queue

pytest.importorskip("nvidia_resiliency_ext", reason="needs nvidia-resiliency-ext: tox -e nvrx")

pytestmark = pytest.mark.multiprocess

MODULES = {
    "megatron": "megatron.core.dist_checkpointing.strategies.async_utils",
    "nvrx": "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_queue(tmp_path_factory.mktemp("queue"), "nvrx")


@pytest.mark.parametrize("mode", ["temporal", "persistent"])
def test_nvrxs_queue_finalises_a_local_save(mode: str, printed: str) -> None:
    for rank in range(2):
        assert f"{mode}, rank {rank}: finalised True, w [{float(rank)}]" in printed
        assert f"{mode}, rank {rank}: refused: rank 1: " in printed


def calls_done_by(owner: str, request: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the loop of a persistent worker reports, here in this process, of one request."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    requests: queue.Queue[Any] = queue.Queue()
    done: queue.Queue[int] = queue.Queue()
    requests.put(request._replace(call_idx=7, finalize_fns=[]))
    requests.put("DONE")
    caller = import_module(MODULES[owner]).PersistentAsyncCaller
    caller.async_loop(0, requests, queue.Queue(), done)
    return list(done.queue)


@pytest.mark.parametrize("owner", ["megatron", "nvrx"])
def test_a_persistent_queue_knows_requests_of_its_own_class_alone(
    owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = LocalCheckpointManager(tmp_path)
    state = BasicTensorAwareStateDict({"w": torch.ones(3)})
    saved = manager.save(state, 1, is_async=True)
    assert saved is not None
    requests = {"megatron": saved, "nvrx": saved.for_nvrx()}
    foreign = requests["nvrx" if owner == "megatron" else "megatron"]

    assert calls_done_by(owner, requests[owner], monkeypatch) == [7]
    assert calls_done_by(owner, foreign, monkeypatch) == []
    saved.wait()
    assert manager.find_latest() == 1


def test_a_request_for_nvrx_is_finalised_with_the_one_it_was_made_of(tmp_path: Path) -> None:
    manager = LocalCheckpointManager(tmp_path)
    state = BasicTensorAwareStateDict({"w": torch.ones(3)})
    saved = manager.save(state, 1, is_async=True)
    assert saved is not None
    request = saved.for_nvrx()
    request.async_fn(*request.async_fn_args, **request.async_fn_kwargs)
    request.execute_finalize_fns(validate_matching_call_idx=False)

    assert saved.done()
    assert [path.suffix for path in tmp_path.rglob("iter_*")] == [".part"]
    assert not Path(request.async_fn_args[0]).exists()
