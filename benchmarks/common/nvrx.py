"""nvidia-resiliency-ext as a candidate, with what it needs on a machine without CUDA."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.local import basic_state_dict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy,
)

from benchmarks.common.disks import flush_share
from dist_ckpt_strategies.cli.bench_rank import stand_in_for_cuda
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import CudaMeansCpu


class _State(basic_state_dict.BasicTensorAwareStateDict):  # type: ignore[misc]
    """Theirs, without the assertion that every tensor is on CUDA."""

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.state_dict = state_dict
        self._is_hollow = False

    def restore_tensor_device(self, non_blocking: bool = True) -> None:  # noqa: FBT001, FBT002
        """The tensors are where they belong."""


class Nvrx:
    """See LocalCandidate. Its request is carried out by itself, as its queue would in a process.

    With ``flushes`` its files are flushed, so that a save is as durable as the others'.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, flushes: bool) -> None:
        self._tensors = tensors
        self._flushes = flushes
        self._strategy = CliqueReplicationStrategy.from_replication_params(1, 2)
        self._request: Any = None
        stand_in_for_cuda()

    def save(self, root: Path, iteration: int) -> None:
        with CudaMeansCpu():
            self._manager(root).save(self._state(), iteration)
        if self._flushes:
            flush_share(root, 0, 1)

    def begin(self, root: Path, iteration: int) -> None:
        with CudaMeansCpu():
            self._request = self._manager(root).save(self._state(), iteration, is_async=True)

    def finish(self) -> None:
        self._request.execute_sync()

    def load(self, root: Path) -> list[torch.Tensor]:
        manager = self._manager(root)
        with CudaMeansCpu():
            manager.find_latest()
            state, _ = manager.load()
        return list(state.tensors)

    def _manager(self, root: Path) -> Any:
        """A new one: theirs does not notice that its directory has been removed."""
        return LocalCheckpointManager(root, repl_strategy=self._strategy)

    def _state(self) -> _State:
        return _State({"model": list(self._tensors)})
