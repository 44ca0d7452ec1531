"""A script for torchrun: it knows nothing of this package."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
(Path(os.environ["CLUSTER_SHARED"]) / "ready" / os.environ["RANK"]).touch()
while True:
    dist.barrier()
