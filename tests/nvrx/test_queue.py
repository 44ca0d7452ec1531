"""NVRx's queue takes the requests of local saves, in its own class and in no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dist_ckpt_strategies.local import BasicTensorAwareStateDict, LocalCheckpointManager
from tests.support.queues import run_queue

pytest.importorskip("nvidia_resiliency_ext", reason="needs nvidia-resiliency-ext: tox -e nvrx")

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_queue(tmp_path_factory.mktemp("queue"), "nvrx")


@pytest.mark.parametrize("mode", ["temporal", "persistent"])
def test_nvrxs_queue_finalises_a_local_save(mode: str, printed: str) -> None:
    for rank in range(2):
        assert f"{mode}, rank {rank}: finalised True, w [{float(rank)}]" in printed
        assert f"{mode}, rank {rank}: refused: rank 1: " in printed


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
