"""Strategies that keep copies of a rank's state at other ranks, under the names of NVRx."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from dist_ckpt_strategies.comm.base import Communicator, run_and_gather, run_collectively
from dist_ckpt_strategies.comm.exchange import exchange
from dist_ckpt_strategies.comm.process_group import (
    ProcessGroup,
    group_ranks,
    is_alive,
    is_default_group,
    is_distributed,
    new_group_of,
    payload_device,
)
from dist_ckpt_strategies.comm.tensor_bytes import TensorBytes
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import (
    MIB,
    limit_of_wait,
    local_world_size,
    options_from_environment,
)
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.local.packs import (
    ReceivedPack,
    decode_shard,
    default_local_allowed,
    read_shard,
    sealed_image,
)
from dist_ckpt_strategies.local.plan import (
    ExchangePlan,
    Transfer,
    build_cliques,
    build_exchange_plan,
)
from dist_ckpt_strategies.local.retrieve import Received, pack_blocks
from dist_ckpt_strategies.local.state_dicts import TensorAwareStateDict
from dist_ckpt_strategies.megatron.types import raises_megatron_errors
from dist_ckpt_strategies.sharded.async_request import BackgroundWork
from dist_ckpt_strategies.storage.io_pool import Deadline

DEFAULT_BUCKET_NBYTES = 64 * MIB

States = tuple[list[TensorAwareStateDict], list[str]]
"""States and their ids."""


class ReplicationStrategy(ABC):
    """How copies of states get to other ranks and back. Every method is collective."""

    @abstractmethod
    def replicate(self, local_ckpt: TensorAwareStateDict, id_: str) -> States:
        """The states of all ranks that keep copies for each other, and their ids."""

    @abstractmethod
    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Sequence[str]], wanted: Sequence[str]
    ) -> ExchangePlan:
        """Plan how every rank gets the states that it wants.

        There are the ids of the states that each global rank has, and of those that this one wants.
        Where no rank has one of them it is a NoReplicasAvailableError.
        """

    @abstractmethod
    def retrieve_execute(self, *args: Any, **kwargs: Any) -> Any:
        """Carry out a plan."""


class CliqueReplicationStrategy(ReplicationStrategy):
    """All ranks of a group keep copies for each other.

    Args:
        local_group: the clique's process group. An asynchronous save sends over it in the
            background, so nothing else may use it then; ``from_replication_params`` makes such
            groups.
        target_device: where the bytes travel: ``cpu``, or ``cuda`` over a group with NCCL.
        max_bucket_bytes: bound, in bytes, on what travels at once in each direction.
        timeout_s: longest wait for a peer, in seconds; by default what the environment says.
    """

    def __init__(
        self,
        local_group: ProcessGroup | None,
        target_device: str = "cpu",
        *,
        max_bucket_bytes: int = DEFAULT_BUCKET_NBYTES,
        timeout_s: float | None = None,
    ) -> None:
        self.local_group: ProcessGroup | None = getattr(local_group, "group", local_group)
        self.target_device = target_device
        self.max_bucket_bytes = max_bucket_bytes
        self._timeout_s = options_from_environment().with_changes(timeout_s=timeout_s).timeout_s
        self._work: weakref.ref[BackgroundWork[Any]] | None = None

    @classmethod
    @raises_megatron_errors
    def from_replication_params(
        cls,
        replication_jump: int = 0,
        replication_factor: int = 2,
        *,
        allow_uneven: bool = False,
        target_device: str = "cpu",
        max_bucket_bytes: int = DEFAULT_BUCKET_NBYTES,
        timeout_s: float | None = None,
    ) -> CliqueReplicationStrategy:
        """Make the process groups of all cliques; see ``build_cliques``.

        Collective over the world. Call it once, not for every save.

        Args:
            replication_jump: ranks between a copy and the next, those that fail together; 0 means
                the ranks of a node, as the environment's LOCAL_WORLD_SIZE says.
            replication_factor: copies of each shard, its owner's among them.
            allow_uneven: make some cliques larger where the numbers do not fit.
            target_device: ``cpu`` makes gloo groups, ``cuda`` NCCL ones.
            max_bucket_bytes: as for the class, and so is the next.
            timeout_s: see above.

        Raises:
            PlanError: the numbers do not fit the world.
            StrategyError: ``replication_jump`` is 0 and LOCAL_WORLD_SIZE is not set.
        """
        limit_s = options_from_environment().with_changes(timeout_s=timeout_s).timeout_s
        world = open_communicator(None, timeout_s=limit_s, purpose="making of cliques")

        def ask() -> list[Any]:
            jump = replication_jump or local_world_size()
            return [jump, replication_factor, bool(allow_uneven)]

        asked = run_and_gather(world, ask)
        for rank, numbers in enumerate(asked):
            if numbers != asked[0]:
                raise PlanError(
                    f"rank {world.global_ranks[rank]} asks for other cliques than rank "
                    f"{world.global_ranks[0]}: give replication_jump, replication_factor and "
                    "allow_uneven alike"
                )
        cliques = build_cliques(world.size, *asked[0][:2], allow_uneven=allow_uneven)
        backend = "nccl" if target_device.startswith("cuda") else "gloo"
        group = new_group_of(cliques, backend=backend, timeout_s=limit_s)
        return cls(group, target_device, max_bucket_bytes=max_bucket_bytes, timeout_s=timeout_s)

    @property
    def is_alive(self) -> bool:
        """Whether the process group has not been destroyed; without one, this process is alone."""
        return not is_distributed() if self.local_group is None else is_alive(self.local_group)

    @property
    def is_over_default_group(self) -> bool:
        """Whether the members meet in torch's default group, as training does."""
        return is_default_group(self.local_group)

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The members, ascending."""
        return group_ranks(self.local_group)

    def communicator(self, purpose: str, detail: str = "") -> Communicator:
        """The clique, for one save or load; the purpose is equal on all ranks."""
        is_on_gpu = self.target_device.startswith("cuda")
        return open_communicator(
            self.local_group,
            timeout_s=self._timeout_s,
            purpose=purpose,
            detail=detail,
            payload_device=payload_device(self.local_group) if is_on_gpu else None,
        )

    def note_use(self, work: BackgroundWork[Any]) -> None:
        """Have ``let_finish`` wait for a save in the background. Rank-local."""
        self._work = weakref.ref(work)

    def let_finish(self, timeout_s: float | None = None) -> None:
        """Return when no save in the background uses this strategy any more. Rank-local.

        Several managers may share a strategy: the messages of two saves must not mix. After
        ``timeout_s`` it is a StorageTimeoutError.
        """
        work = None if self._work is None else self._work()
        if work is not None:
            limit_s = limit_of_wait(self._timeout_s) if timeout_s is None else timeout_s
            work.wait(limit_s, "a save in the background with the same strategy")

    @raises_megatron_errors
    def replicate(self, local_ckpt: TensorAwareStateDict, id_: str) -> States:
        """The states of the clique's members, in the order of their ranks, and their ids.

        Collective over the clique. Takes the memory of the peers' states, and two buckets. Those
        states are on the CPU; ``restore_tensor_device`` moves them to their devices.
        """
        comm = self.communicator("replication", f"of {id_}")

        def own_id() -> str:
            self.let_finish()
            return str(id_)

        ids = run_and_gather(comm, own_id)
        names = [f"{id_} of rank {rank}" for rank, id_ in enumerate(ids)]
        ranks = range(comm.size)
        transfers = [Transfer(names[sender], sender, rank) for sender in ranks for rank in ranks]
        states = self._exchange(comm, lambda: transfers, {names[comm.rank]: local_ckpt})
        return [states[name] for name in names], ids

    @raises_megatron_errors
    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Sequence[str]], wanted: Sequence[str]
    ) -> ExchangePlan:
        """Plan how every member gets the states that it wants, in global ranks.

        Collective over the clique. See ReplicationStrategy. The ids may also be a list, in
        the order of the ranks.
        """
        comm = self.communicator("plan of a retrieval")

        def ask() -> list[str]:
            self.let_finish()
            return [str(id_) for id_ in wanted]

        wishes = dict(zip(comm.global_ranks, run_and_gather(comm, ask), strict=True))

        def plan() -> ExchangePlan:
            # NVRx hands on a list of all ranks' as it was gathered.
            given: Any = globally_available_ids
            by_rank = given if isinstance(given, Mapping) else dict(enumerate(given))
            available = {rank: list(map(str, by_rank.get(rank, ()))) for rank in wishes}
            return build_exchange_plan(available, wishes, comm.global_ranks[comm.rank])

        return run_collectively(comm, plan)

    @raises_megatron_errors
    def retrieve_execute(
        self, plan: ExchangePlan, my_data: Mapping[str, TensorAwareStateDict]
    ) -> dict[str, Any]:
        """Send and receive the states of a plan; returns what this rank wanted, by id.

        Collective over the clique. ``my_data`` has the states that the plan has this rank send, by
        id.

        Raises:
            PlanError: ``my_data`` lacks one of them.
            CorruptCheckpointError: one arrived damaged.
        """
        comm = self.communicator("retrieval")
        place = {rank: number for number, rank in enumerate(comm.global_ranks)}

        def transfers() -> list[Transfer]:
            return [Transfer(t.id_, place[t.sender], place[t.receiver]) for t in plan.entries]

        return self._exchange(comm, transfers, my_data)

    def _exchange(
        self,
        comm: Communicator,
        planned: Callable[[], Sequence[Transfer]],
        states: Mapping[str, TensorAwareStateDict],
    ) -> dict[str, TensorAwareStateDict]:
        """Carry out transfers, in ranks of ``comm``; what this rank is to have, by id. Collective.

        ``states`` are those that this rank can send, by id.
        """
        allowed, images = default_local_allowed(), dict[str, torch.Tensor]()
        transfers: list[Transfer] = []

        def encode() -> dict[str, int]:
            self.let_finish()
            transfers.extend(planned())
            for id_ in sorted({t.id_ for t in transfers if t.sender == comm.rank}):
                if id_ not in states:
                    raise PlanError(
                        f"the plan has this rank send {id_}, which my_data does not hold"
                    )
                images[id_] = sealed_image(states[id_], comm.global_ranks[comm.rank], allowed)
            return {id_: image.numel() for id_, image in images.items()}

        def read(id_: str, start: int, buffer: torch.Tensor) -> torch.Tensor:
            return TensorBytes([images[id_]]).read(start, buffer)

        def decode(_: Deadline) -> None:
            deadline = Deadline.after(self._timeout_s)
            for t, memory in received.items():
                pack = ReceivedPack(f"from rank {comm.global_ranks[t.sender]}", memory.numpy())
                wanted[t.id_] = decode_shard(read_shard(pack, t.id_, deadline), allowed)

        sizes = run_and_gather(comm, encode)
        wanted = {t.id_: states[t.id_] for t in transfers if t.sender == t.receiver == comm.rank}
        received: Received = {}
        blocks = partial(pack_blocks, comm, transfers, sizes, read, received)
        exchange(comm, blocks, decode, max_inflight_nbytes=self.max_bucket_bytes)
        return wanted


EagerT = TypeVar("EagerT", bound=ReplicationStrategy)


class LazyReplicationStrategyBuilder(ReplicationStrategy, ABC, Generic[EagerT]):
    """Makes its strategy when it is first needed, once the process groups can be made."""

    def __init__(self) -> None:
        self._strategy: EagerT | None = None

    @property
    def replication_strategy(self) -> EagerT:
        """The strategy itself; making it is collective over the world.

        It is made again once torch.distributed has been destroyed and initialised again.
        """
        if self._strategy is None or not getattr(self._strategy, "is_alive", True):
            self._strategy = self._eager_build()
        return self._strategy

    def replicate(self, local_ckpt: TensorAwareStateDict, id_: str) -> States:
        """See ReplicationStrategy."""
        return self.replication_strategy.replicate(local_ckpt, id_)

    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Sequence[str]], wanted: Sequence[str]
    ) -> ExchangePlan:
        """See ReplicationStrategy."""
        return self.replication_strategy.retrieve_plan(globally_available_ids, wanted)

    def retrieve_execute(self, *args: Any, **kwargs: Any) -> Any:
        """See ReplicationStrategy."""
        return self.replication_strategy.retrieve_execute(*args, **kwargs)

    @abstractmethod
    def _eager_build(self) -> EagerT:
        """Make the strategy."""


class LazyCliqueReplicationStrategy(LazyReplicationStrategyBuilder[CliqueReplicationStrategy]):
    """Cliques whose process groups are made when they are first needed.

    All arguments are those of ``CliqueReplicationStrategy.from_replication_params``.
    """

    def __init__(
        self, replication_jump: int = 0, replication_factor: int = 2, **options: Any
    ) -> None:
        super().__init__()
        self.replication_jump = replication_jump
        self.replication_factor = replication_factor
        self._options = options

    def _eager_build(self) -> CliqueReplicationStrategy:
        return CliqueReplicationStrategy.from_replication_params(
            self.replication_jump, self.replication_factor, **self._options
        )
