"""The one script of the seams: the loop of a cell on one rank, under either launcher."""

import faulthandler
import os
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
from tests.seams.rank import CELL, SHARED, Seams

LOOPS = {
    "plain": "torch_loops.plain",
    "DCP": "torch_loops.dcp",
    "Lightning": "lightning_loop.train",
    "Megatron-LM": "megatron_loop.train",
}


def main() -> None:
    faulthandler.dump_traceback_later(100)  # of a hang
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    (SHARED / "pids" / str(os.getpid())).touch()
    module, _, name = LOOPS[CELL["loop"]].partition(".")
    train = getattr(import_module(f"tests.seams.{module}"), name)
    if CELL["wraps"]:
        wait_rank()
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
        barrier_timeout_s=20,
    )(block)()


if __name__ == "__main__":
    main()
