"""The one script of the seams: the loop of a cell on one rank, under either launcher."""

import faulthandler
import os
import time
import warnings
from importlib import import_module

import torch

from dist_ckpt_strategies.inprocess import (
    CheckpointlessAbortManager,
    CheckpointlessFinalizeCleanup,
    HPCallWrapper,
    HPWrapper,
)
from dist_ckpt_strategies.inprocess.train_utils import wait_rank
from tests.seams.rank import BARRIER_S, CELL, IS_TORCHRUN, SHARED, Seams

LOOPS = {"plain": "plain", "DCP": "dcp", "Lightning": "lightning", "Megatron-LM": "megatron"}


def main() -> None:
    faulthandler.dump_traceback_later(200)  # of a hang
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Megatron-Core compiles functions that no cell calls: the imports for it take 4 s of each rank.
    vars(torch)["compile"] = lambda function=None, **_: function
    (SHARED / "pids" / str(os.getpid())).touch()
    train = import_module(f"tests.seams.{LOOPS[CELL['loop']]}_loop").train
    if CELL["wraps"]:
        wait_rank()
    if CELL["saves"] != "none":
        import_module("dist_ckpt_strategies.manager.manager")
    if IS_TORCHRUN:
        meet()
    seams = Seams()
    if CELL["loop"] == "Megatron-LM" or not CELL["wraps"]:
        train(seams)
        return

    def block(call: HPCallWrapper | None = None) -> None:
        train(seams, call)

    HPWrapper(
        abort=CheckpointlessAbortManager.get_default_checkpointless_abort(),
        finalize=CheckpointlessFinalizeCleanup(),
        checkpoint_manager=seams.memory,
        barrier_timeout_s=BARRIER_S,
    )(block)()


def meet() -> None:
    """Wait for the other rank of this start, whose imports may take longer than a limit."""
    start = SHARED / f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}"
    start.mkdir(exist_ok=True)
    (start / os.environ["RANK"]).touch()
    while len(list(start.iterdir())) < 2:
        time.sleep(0.02)


if __name__ == "__main__":
    main()
