"""Values of an elastic agent: its job, its workers' environment, news of its place."""

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dist_ckpt_strategies.config import JOB, PLACE, RENDEZVOUS
from dist_ckpt_strategies.inprocess.rendezvous import RankInfo

GAVE_UP, NODE_MISSING, FENCED, KILLED, SIGNAL_CODE = 1, 87, 88, 89, 128
"""Exit codes of an agent: all ended by an error; a node is missing; this node is out; after a
signal ranks had to be killed; a signal, whose number is added."""

_FENCES_PER_TTL = 2


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a job. All its agents say the same, but for ``wait_s`` and the last two.

    Attributes:
        num_nodes: places.
        num_ranks: of each node.
        num_spare_nodes: nodes that may wait for a place, for as long as the job runs.
        run_id: name of the job.
        ttl_s: seconds without a renewal after which a place may be given to another node. A node
            that has not renewed its own for half of them kills its workers.
        wait_s: how long the job waits for a node, at its start or for another one's place.
        endpoint: host and port of the store.
        node_rank: the place to take if it is vacant.
        is_store_only: run no ranks, but host the store.
    """

    num_nodes: int
    num_ranks: int
    num_spare_nodes: int = 0
    run_id: str = "none"
    ttl_s: float = 10.0
    wait_s: float = 600.0
    endpoint: tuple[str, int] = ("127.0.0.1", 29400)
    node_rank: int | None = None
    is_store_only: bool = False

    @property
    def fence_s(self) -> float:
        """After how long without a renewal a node's workers are killed."""
        return self.ttl_s / _FENCES_PER_TTL


@dataclass(frozen=True, slots=True)
class Job:
    """The job of an elastic agent.

    Attributes:
        command: program and arguments of every worker.
        num_ranks: number of ranks of this node.
        num_spares: number of processes that wait, with everything imported, to take over a rank.
        max_restarts: number of workers that may be replaced, in total.
        heartbeat_timeout_s: seconds without a heartbeat before a worker counts as hung; 0: no
            check.
        shutdown_timeout_s: seconds that workers have to end by themselves after a signal.
        nodes: nodes of the job; None: this one alone, with a store of its own.
        event_log_handler: torch's name of the handler of its events.
        role: name of the workers, for their variables.
        signals: what ends the job, and is passed on to the workers.
    """

    command: tuple[str, ...]
    num_ranks: int
    num_spares: int = 0
    max_restarts: int = 16
    heartbeat_timeout_s: float = 30.0
    shutdown_timeout_s: float = 30.0
    nodes: Nodes | None = None
    event_log_handler: str = "null"
    role: str = "default"
    signals: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

    @property
    def run_id(self) -> str:
        """Name of the job."""
        return "none" if self.nodes is None else self.nodes.run_id

    @property
    def num_nodes(self) -> int:
        """Number of nodes that have ranks."""
        return 1 if self.nodes is None else self.nodes.num_nodes


@dataclass(frozen=True, slots=True)
class Placed:
    """This node has got a place; None: it waits for one, as a spare."""

    place: int | None


@dataclass(frozen=True, slots=True)
class Ended:
    """The job has ended, or this node's part in it: the agent's exit code, and why."""

    code: int
    why: str


News = Placed | Ended | str
"""News of an agent's place; a text is for its output."""


def script_command(script: str, args: Sequence[str], *, is_module: bool) -> tuple[str, ...]:
    """The command that runs a script, or a module, with this Python."""
    return (sys.executable, *(("-m",) if is_module else ()), script, *args)


def worker_environment(
    job: Job, given: Mapping[str, str], address: tuple[str, int], job_id: str
) -> dict[str, str]:
    """Variables of all workers: those given, and what they find the job's store by."""
    host, port = address
    num_threads = {} if job.num_ranks == 1 else {"OMP_NUM_THREADS": "1"}
    return {
        **num_threads,
        "TORCHELASTIC_RUN_ID": job.run_id,
        "ROLE_NAME": job.role,
        "PYTHONUNBUFFERED": "1",
        **given,
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # init_process_group(...) of a worker finds this store, and under it a place of the attempt.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        RENDEZVOUS: f"{host}:{port}",
        JOB: job_id,
    }


def rank_info(job: Job, place: int, rank: int, address: tuple[str, int], node: str) -> RankInfo:
    """Facts for a worker with a rank of a node's place; ``node`` is "" in a job of one node."""
    size, (host, port) = job.num_ranks, address
    world_size = size * job.num_nodes
    variables = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "GROUP_RANK": str(place),
        "GROUP_WORLD_SIZE": str(job.num_nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
    }
    if node:
        variables[PLACE] = f"place/{place}={node}"
    return RankInfo(rank, rank % size, world_size, size, tuple(variables.items()))
