"""Work behind training, and how others see that it has ended."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from dist_ckpt_strategies.errors import PeerTimeoutError
from dist_ckpt_strategies.local.background import BackgroundWork, wait_for_mark


def waiting(work: BackgroundWork[int]) -> threading.Thread:
    """What the worker of a checkpoint queue does, on a thread."""
    thread = threading.Thread(
        target=wait_for_mark, args=(str(work.end_mark), os.getpid()), daemon=True
    )
    thread.start()
    return thread


@pytest.mark.parametrize("has_room", [True, False], ids=["marked", "no room for the mark"])
def test_others_see_the_end(has_room: bool) -> None:
    may_end = threading.Event()
    work = BackgroundWork(lambda: 7 if may_end.wait(60) else 0, "work")
    if not has_room:
        work.end_mark.symlink_to(Path("missing") / "directory")  # where no file can be made
    worker = waiting(work)
    work.start()
    with pytest.raises(PeerTimeoutError, match=r"not done after 0\.05 s"):
        work.wait(0.05)
    assert worker.is_alive()

    may_end.set()
    worker.join(60)

    assert not worker.is_alive()
    work.wait(60)
    assert work.is_done()
    assert work.result() == 7
    work.forget_mark()
    assert not work.end_mark.parent.exists()
