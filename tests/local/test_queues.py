"""Megatron-Core's queue takes the requests of local saves, and tells when one has failed."""

from __future__ import annotations

import pytest

from tests.support.queues import run_queue

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_queue(tmp_path_factory.mktemp("queue"), "megatron")


@pytest.mark.parametrize("mode", ["temporal", "persistent"])
def test_megatrons_queue_finalises_a_local_save(mode: str, printed: str) -> None:
    for rank in range(2):
        assert f"{mode}, rank {rank}: finalised True, w [{float(rank)}]" in printed
        assert f"{mode}, rank {rank}: refused: rank 1: " in printed
