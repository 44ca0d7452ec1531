"""NVRx's queue takes the requests of local saves, in its own class and in no other."""

from __future__ import annotations

import pytest

from tests.support.queues import run_queue

pytest.importorskip("nvidia_resiliency_ext", reason="needs nvidia-resiliency-ext: tox -e nvrx")

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("queue")
    return run_queue(directory, "nvrx", "temporal", "persistent", "foreign")


@pytest.mark.parametrize("mode", ["temporal", "persistent"])
def test_nvrxs_queue_finalises_a_local_save(mode: str, printed: str) -> None:
    for rank in range(2):
        assert f"{mode}, rank {rank}: finalised True, w [{float(rank)}]" in printed
        assert f"{mode}, rank {rank}: refused: rank 1: " in printed


def test_nvrxs_persistent_queue_passes_over_a_request_of_megatrons(printed: str) -> None:
    for rank in range(2):
        assert f"foreign, rank {rank}: queue [], written True, latest 1" in printed


def test_megatrons_persistent_queue_passes_over_a_request_of_nvrxs(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    printed = run_queue(tmp_path_factory.mktemp("queue"), "megatron", "foreign")

    for rank in range(2):
        assert f"foreign, rank {rank}: queue [], written True, latest 1" in printed
