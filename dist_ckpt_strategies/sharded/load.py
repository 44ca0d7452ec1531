"""Carry out a LoadPlan: fill tensors from storage, zeros where storage has nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.report import LoadReport
from dist_ckpt_strategies.sharded.plan_load import LoadPlan
from dist_ckpt_strategies.sharded.transfer import TensorRead, run_reads
from dist_ckpt_strategies.storage.base import ArrayReader


def run_load(
    plan: LoadPlan, targets: Sequence[torch.Tensor], store: ArrayReader, options: Options
) -> LoadReport:
    """Fill the tensors that the plan's shards go to. Rank-local; wrap it in ``agree``.

    Args:
        plan: one read for each wanted shard.
        targets: the tensor of each wanted shard, shaped like its region; of another dtype than the
            stored one it is converted to. Overwritten in place; after an error their content is
            undefined.
        store: where the arrays are.
        options: timeout and memory budget.

    Raises:
        StorageError: a chunk is missing, of the wrong size, or cannot be read.
    """
    started = time.monotonic()
    reads = []
    for read in plan.reads:
        tensor = targets[read.number].detach()
        if read.is_padded:
            tensor.zero_()
        if read.source is not None and read.target is not None:
            part = tensor[read.target.slices()] if read.is_padded else tensor
            reads.append(TensorRead(read.array, read.source, part))
    run_reads(store, reads, options)
    return LoadReport(len(plan.reads), plan.nbytes, time.monotonic() - started)
