"""Checkpoints on the nodes' own disks, kept by the ranks for each other."""

import logging
import operator
import os
import time
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch

from dist_ckpt_strategies.comm.base import Communicator, run_collectively
from dist_ckpt_strategies.comm.process_group import ProcessGroup
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import limit_of_wait, options_from_environment
from dist_ckpt_strategies.device import HostSnapshot, await_gpu, uses_cuda
from dist_ckpt_strategies.errors import PlanError, StrategyError
from dist_ckpt_strategies.formats.course import Resumed
from dist_ckpt_strategies.formats.locations import located
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.local.inventory import Inventory, gather_inventory, remove_outdated
from dist_ckpt_strategies.local.packs import (
    decode_shard,
    default_local_allowed,
    joined,
    split_state,
)
from dist_ckpt_strategies.local.plan import LocalShardId, SaveId
from dist_ckpt_strategies.local.replication import (
    DEFAULT_BUCKET_NBYTES,
    CliqueReplicationStrategy,
    LazyReplicationStrategyBuilder,
    ReplicationStrategy,
)
from dist_ckpt_strategies.local.retrieve import load_newest
from dist_ckpt_strategies.local.save import (
    Prepared,
    Started,
    Written,
    finish_save,
    start_save,
    write_shards,
)
from dist_ckpt_strategies.local.shard_files import ShardDirectory
from dist_ckpt_strategies.local.state_dicts import TensorAwareStateDict
from dist_ckpt_strategies.megatron.types import raises_megatron_errors
from dist_ckpt_strategies.sharded.async_request import BackgroundWork, LocalSaveRequest
from dist_ckpt_strategies.sharded.unchanged import LastSave
from dist_ckpt_strategies.storage.io_pool import ENDING, OPENING, WORK, Deadline, run_within

logger = logging.getLogger(__name__)


class LocalCheckpointManager:
    """Saves every rank's state to its node, and loads the newest that can be assembled.

    Each rank writes its own shard and those of its clique below
    ``<root_local_ckpt_dir>/<session_id>/<its global rank>``. A shard that is lost or damaged is
    taken from any rank that has a copy, whatever cliques there were at the save.

    A manager that is bound to a training, by ``bind`` or by a TieredCheckpointManager, loads and
    removes only checkpoints of this training; one that is not, only those without a training.

    All ranks make a manager alike, and call its methods together.

    Args:
        root_local_ckpt_dir: a directory of this node, with space for two saves of all shards that
            its ranks keep. A relative path is one from the current directory.
        session_id: tells the checkpoints of one training from those of others.
        repl_strategy: who keeps copies for whom; without one, no rank does. At a load, copies are
            found and used with or without it.
        keep: saves to keep, the newest included.
        group: all ranks, or the first ones of the world; the world by default.
        timeout_s: longest wait for a peer, in seconds; by default what the environment says.
        max_bucket_bytes: bound, in bytes, on what travels at once in a load. In a save the
            strategy's holds.
        allow: further classes that the state may hold objects of.
        on_unchanged: see ``save``, of ("safetensors", 1); by default what the environment says.
    """

    def __init__(  # noqa: PLR0913 - NVRx's three, and options by name
        self,
        root_local_ckpt_dir: str | Path,
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        *,
        keep: int = 1,
        group: ProcessGroup | None = None,
        timeout_s: float | None = None,
        max_bucket_bytes: int = DEFAULT_BUCKET_NBYTES,
        allow: Allowed = (),
        on_unchanged: str | None = None,
    ) -> None:
        if keep < 1:
            raise PlanError(f"keep: expected 1 or more saves, found {keep}")
        if max_bucket_bytes < 1:
            raise PlanError(f"max_bucket_bytes: expected 1 or more, found {max_bucket_bytes}")
        name: object = session_id
        if not isinstance(name, str) or Path(name).name != name or name == ".." or "\0" in name:
            raise PlanError(f"session_id: expected a name that is no path, found {session_id!r}")
        self.root_local_ckpt_dir = Path(root_local_ckpt_dir).absolute()
        self.session_id = session_id
        self.repl_strategy = repl_strategy
        self._directory = ShardDirectory(self.root_local_ckpt_dir / session_id)
        self._keep = keep
        self._group = group
        changes = {"timeout_s": timeout_s, "on_unchanged": on_unchanged}
        options = options_from_environment().with_changes(**changes)
        self.timeout_s, self._on_unchanged = options.timeout_s, options.on_unchanged
        self.max_bucket_bytes = max_bucket_bytes
        self._allowed = default_local_allowed(allow)
        self._memory = HostSnapshot()
        self._running: BackgroundWork[Written] | None = None
        self._newest: SaveId | None = None
        self._lock: object = None
        self._last: LastSave | None = None

    @property
    def local_ckpt_dir(self) -> Path:
        """The directory of this rank's own shard and its copies of others' shards."""
        comm = self.communicator("directory")
        return self._directory.holder_directory(comm.rank)

    @raises_megatron_errors
    def bind(self, root: str | Path) -> None:
        """Bind the manager to the training whose global checkpoints are below a directory or URL.

        Rank-local; equal on all ranks. The first rank keeps a random id there, in a small file.
        A PlanError if the manager is bound to another root.
        """
        place, bound = located(root, options_from_environment()), self._directory.training_root
        if bound is not None and str(bound) != str(place):
            raise PlanError(
                f"the manager of local checkpoints below {self.root_local_ckpt_dir} is bound to "
                f"{bound}, and cannot be bound to {place}; make one for each training"
            )
        self._directory = ShardDirectory(self._directory.root, place)

    @raises_megatron_errors
    def save(
        self,
        state_dict: TensorAwareStateDict,
        iteration: int,
        is_async: bool = False,  # noqa: FBT001, FBT002 - the signature of NVRx
    ) -> LocalSaveRequest | None:
        """Save every rank's state, and remove what is not to be kept any longer.

        Collective. Either the shards of all ranks are there then, durably, or an error is raised
        on every rank, and the saves before are untouched.

        Args:
            state_dict: this rank's state.
            iteration: of the training; equal on all ranks.
            is_async: return when the tensors have been copied to host memory, and do the rest in
                the background; equal on all ranks. The copy's memory is kept for the next save.
                The save counts once the request is finalised; till then nothing else may send
                over the strategy's process group.

        Returns:
            With ``is_async``, a request: a checkpoint queue, or its ``wait``, finalises it.

        Raises:
            PlanError: ranks differ in arguments or session, or a tensor cannot be stored.
            UnsafeObjectError: an object's class is not allowed; with ``is_async``, of the request.
            CheckpointChangedError: another job saves in this directory and session.
            StorageError: a shard cannot be written, as on a full disk.
            StrategyError: the state is no TensorAwareStateDict; or, with ``is_async``, the group
                of the strategy is the training's, or sends over NCCL.
            PeerError: the same on another rank.
        """
        comm = self.communicator("local save", f"of iteration {iteration}")
        strategy: Any = self.repl_strategy
        if isinstance(strategy, LazyReplicationStrategyBuilder):
            strategy = strategy.replication_strategy  # collective over the world the first time
        prepare = partial(self._prepare, comm, state_dict, iteration, strategy, is_async=is_async)
        started = start_save(comm, self._directory, prepare)
        self._newest, work = started.save, started.work
        if work is None:
            self._finish(started, lambda: write_shards(started))
            return None
        self._running = work
        if strategy is not None:
            strategy.note_use(work)
        work.begin()

        def written() -> Written:
            work.wait((WORK + 1 / 8) * self.timeout_s)  # the work's own limit says more
            return work.result()

        @raises_megatron_errors
        def finish() -> None:
            try:
                self._finish(started, written)
            finally:
                if self._running is work and work.ends_within(0):
                    self._running = None

        what = f"the end of the local save of iteration {started.save.iteration}"
        return LocalSaveRequest(comm, (started.save.stamp, what), work, finish, self.timeout_s)

    def _finish(self, started: Started, written: Callable[[], Written]) -> None:
        """Complete a save, then remove what is not kept. Collective.

        While a later save is under way, that one removes it.
        """
        known = self.session_id, self._last, self._on_unchanged
        before, self._last = finish_save(started, written, *known)
        if started.save == self._newest:
            deadline = Deadline.after(ENDING * self.timeout_s)
            remove_outdated(
                started.comm.rank, self._directory, before, started.save, self._keep, deadline
            )

    @raises_megatron_errors
    def find_latest(self) -> int:
        """The newest iteration whose shards are all there somewhere, or -1.

        Collective. Descriptions are checked, tensors are not: ``load`` may have to fall back. With
        -1, ``load`` tells by its error whether there was a checkpoint whose shards were lost.
        """
        return next((step for step, is_complete in self.iterations().items() if is_complete), -1)

    @raises_megatron_errors
    def iterations(self) -> dict[int, bool]:
        """Iterations, the newest first, and whether all their shards are there somewhere.

        Collective. Descriptions are checked, tensors are not.
        """
        comm = self.communicator("search for local checkpoints")
        inventory = self._inventory(comm)
        missing = inventory.missing_text()
        if missing and comm.rank == 0:
            logger.warning("%s: incomplete local checkpoints: %s", self._directory, missing)
        if inventory.foreign and comm.rank == 0:
            logger.warning("%s", inventory.foreign)
        found = dict[int, bool]()
        for (save, _), ranks in inventory.missing().items():
            found[save.iteration] = found.get(save.iteration, False) or not ranks
        return found

    @raises_megatron_errors
    def load(
        self, *, at_least: int = 0, at_most: float = inf, on_host: bool = False
    ) -> tuple[Any, tuple[int, int, str]]:
        """The newest state that can be assembled, and its id, as NVRx gives it.

        Collective. Every tensor's digest is compared. Where a copy is damaged another one is
        used, and where there is none, the save before.

        Args:
            at_least: saves of iterations before this one are left alone.
            at_most: saves of later iterations are left alone.
            on_host: leave all tensors on the CPU, as where the host has no GPU. By default each is
                moved back to the device that it was on.

        Returns:
            The state; and iteration, this rank, and session id.

        Raises:
            CheckpointNotFoundError: there is no complete checkpoint. (The remains of a first save
                that was killed do not count.)
            NoReplicasAvailableError: each save has lost a shard; says which.
            StorageError: all are of other trainings.
            PlanError: it was saved by another number of ranks, and is no MCoreTensorAwareStateDict.
        """
        comm = self.communicator("load of a local checkpoint")
        inventory, limit = self._inventory(comm, (at_least, at_most)), self.max_bucket_bytes
        shards = load_newest(comm, self._directory, inventory, limit, self.timeout_s)
        info = shards[0].info

        def decode() -> Any:
            states = [decode_shard(shard, self._allowed, on_host=on_host) for shard in shards]
            return states[0] if info.world_size == comm.size else joined(states, info, comm.size)

        state = run_collectively(comm, decode, follows=True)  # 5
        own = LocalShardId(info.shard_id.save, comm.rank)
        logger.log(comm.report_level, "rank %s: loaded %s", own.global_rank, own)
        return state, (own.save.iteration, comm.rank, self.session_id)

    def communicator(self, purpose: str, detail: str = "") -> Communicator:
        """All ranks of the manager, each by its global rank, for one thing that they do together.

        Raises:
            PlanError: the group lacks one of the world's first ranks, by whose numbers shards go.
        """
        comm = open_communicator(
            self._group,
            timeout_s=self.timeout_s,
            purpose=f"{purpose} in session {self.session_id!r}" if self.session_id else purpose,
            detail=f"{detail} below {self.root_local_ckpt_dir}".lstrip(),
        )
        ranks = list(comm.global_ranks)
        if ranks != list(range(comm.size)):
            raise PlanError(f"group: expected ranks 0 to {comm.size - 1} in order, found {ranks}")
        return comm

    def resumed_at(self, began: Resumed | None) -> None:
        """Neither load nor keep what the training had left when its course began. Rank-local."""
        self._directory.resumed = began and (began[0], began[1])

    def abandon(self) -> None:
        """Wait for the end of a save under way, without making it complete. Rank-local.

        Raises:
            StorageTimeoutError: it does not end.
        """
        self._let_finish()
        self._running = None

    def _let_finish(self) -> None:
        """Return when a save that is still running has written all. Rank-local.

        It uses the memory and the groups that the next one needs.
        """
        if self._running is not None:
            self._running.wait(limit_of_wait(self.timeout_s), "the save before")

    def _inventory(self, comm: Communicator, between: tuple[int, float] = (0, inf)) -> Inventory:
        where = self._directory, self.session_id
        return gather_inventory(comm, *where, self.timeout_s, self._let_finish, between)

    def _prepare(
        self,
        comm: Communicator,
        state: Any,
        iteration: int,
        strategy: CliqueReplicationStrategy | None,
        *,
        is_async: bool,
    ) -> Prepared:
        """Prepare this rank's part of a save. Rank-local."""
        self._let_finish()
        _require_usable(strategy, is_async=is_async)
        directory, clique = self._directory, Communicator([comm.rank])

        def look() -> str:
            self._lock = directory.lock(comm.rank)
            if self._running is None:  # else its files have no names yet
                directory.remove_stale_files(comm.rank)
            return "" if comm.rank else directory.training_id()

        training_id = run_within(Deadline.after(OPENING * self.timeout_s), directory, look)
        if strategy is not None:
            strategy.let_finish(WORK * self.timeout_s)
            clique = strategy.communicator("local save", f"of iteration {iteration}")
        try:
            number = operator.index(iteration)
        except TypeError:
            text = f"iteration: expected a whole number, found {iteration!r}"
            raise PlanError(text) from None
        # A state may have begun to copy its tensors to the host.
        await_gpu(self.timeout_s, f"local save of iteration {number}")
        contents, layout = split_state(state, comm.rank, self.session_id)
        slot = (layout.packs[0].nbytes,), torch.uint8
        (image,) = self._memory.places([slot], is_pinned=uses_cuda())
        return Prepared(
            iteration=number,
            stamp=f"{time.time_ns():016x}{os.urandom(2).hex()}{training_id}",
            is_async=bool(is_async),
            contents=contents,
            allowed=self._allowed,
            layout=layout,
            image=image,
            clique=clique,
            max_bucket_nbytes=(strategy or self).max_bucket_bytes,
            timeout_s=self.timeout_s,
        )


def _require_usable(strategy: object, *, is_async: bool) -> None:
    if strategy is None:
        return
    if not isinstance(strategy, CliqueReplicationStrategy):
        raise StrategyError(
            f"repl_strategy: a {type(strategy).__qualname__} cannot say which ranks keep copies; "
            "derive it from CliqueReplicationStrategy"
        )
    if is_async and strategy.is_over_default_group:
        raise StrategyError(
            "is_async: the strategy's group is the default one, which training uses at the same "
            "time; make it by from_replication_params, or give it a group of its own"
        )
    if is_async and strategy.target_device.startswith("cuda"):
        raise StrategyError(
            "is_async: the strategy sends over NCCL, where messages in the background and those "
            "of training can wait for each other for ever; use target_device='cpu'"
        )
