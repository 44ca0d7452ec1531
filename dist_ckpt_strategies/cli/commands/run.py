"""Arguments of ``run``. They have torchrun's names and meanings where it has them."""

from functools import partial
from typing import Annotated, Any

import typer

from dist_ckpt_strategies.cli.command import Debug, command, flag, value

_count = partial(typer.Option, min=0)
_seconds = partial(typer.Option, metavar="SECONDS", min=0)

Script = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module.")
]
Args = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")]
NprocPerNode = Annotated[
    str,
    typer.Option(
        "--nproc-per-node",
        "--nproc",
        "-n",
        metavar="N",
        help="Ranks of each node; gpu, cpu or auto: one per device.",
    ),
]
Spares = Annotated[
    int,
    _count(
        metavar="S",
        help="Processes per node that wait in wait_rank() to take over a rank. A script that "
        "does not call it would run in each of them as a job of its own.",
    ),
]
MaxRestarts = Annotated[int, _count(metavar="R", help="Workers that may be replaced, in total.")]
HeartbeatTimeout = Annotated[
    float, _seconds(help="Seconds without a heartbeat before a worker counts as hung; 0: no check.")
]
ShutdownTimeout = Annotated[
    float,
    _seconds(
        envvar="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        help="Seconds that workers may take to save and end after a signal; then they are killed.",
    ),
]
Standalone = Annotated[
    bool, flag("--standalone", help="This node alone, whatever the --rdzv options say.")
]
NumNodes = Annotated[str, typer.Option(metavar="N", help="Number of nodes that have ranks.")]
NodeRank = Annotated[
    int | None, value(metavar="N", min=0, help="The node's place in the job, if it is vacant.")
]
Backend = Annotated[str, typer.Option(metavar="NAME", help="c10d, a TCPStore; static is the same.")]
Endpoint = Annotated[
    str,
    value(
        metavar="HOST[:PORT]",
        help="Store by which the nodes find each other; the agent at this address hosts it.",
    ),
]
MasterAddr = Annotated[
    str | None, value(metavar="HOST", help="Host of the store, if --rdzv-endpoint is not given.")
]
MasterPort = Annotated[
    int, typer.Option(metavar="PORT", help="Port of the store, with --master-addr.")
]
JobId = Annotated[str, typer.Option(metavar="ID", help="Name of the job.")]
StoreOnly = Annotated[
    bool, flag("--store-only", help="Host the store, and run no ranks; takes no SCRIPT.")
]
SpareNodes = Annotated[
    int,
    _count(
        metavar="S",
        help="Nodes that wait to take a lost node's place. The script must call wait_rank().",
    ),
]
NodeTtl = Annotated[
    float,
    _seconds(min=1, help="Seconds without a renewal of its place after which a node is lost."),
]
NodeWait = Annotated[
    float,
    _seconds(help="Seconds that the job waits for a node, at the start or in place of a lost one."),
]
LogDir = Annotated[
    str | None, value(metavar="DIR", help="Directory for the files of --redirects and --tee.")
]
Redirects = Annotated[
    str,
    typer.Option(
        "--redirects",
        "-r",
        metavar="STD",
        help="Write output to files: 1 stdout, 2 stderr, 3 both; 0:1,1:2 by local rank.",
    ),
]
Tee = Annotated[
    str,
    typer.Option("--tee", "-t", metavar="STD", help="Write output to files and to the terminal."),
]
LocalRanks = Annotated[
    str,
    value(
        metavar="RANKS",
        help="Show the output of these local ranks only, such as 0,1, and of spares.",
    ),
]
EventLogHandler = Annotated[
    str, value(metavar="NAME", help="Destination of torch's events: null or console.")
]
Role = Annotated[str, typer.Option(metavar="NAME", help="Value of ROLE_NAME for the workers.")]
Signals = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Signals that end the job; they are passed on to the workers.",
    ),
]
NoPython = Annotated[bool, flag("--no-python", help="SCRIPT is a program, not a Python file.")]
IsModule = Annotated[bool, flag("--module", "-m", help="SCRIPT names a module.")]

WithoutEffect = Annotated[str | None, typer.Option(hidden=True)]
"""An option of torchrun's that changes nothing here; see docs/cli.md."""

_REFUSED = {
    "rdzv-conf": "use --node-wait for join_timeout, --node-ttl for keep_alive_interval",
    "logs-specs": "use --log-dir, --redirects and --tee",
    "duplicate-stdout-filters": "use --tee, or a pipe",
    "duplicate-stderr-filters": "use --tee, or a pipe",
    "numa-binding": "bind in the script, by LOCAL_RANK",
    "run-path": "leave it out, the script is run by Python",
    "virtual-local-rank": "set CUDA_VISIBLE_DEVICES in the script, from LOCAL_RANK",
}


def _option(name: str) -> str:
    """The name of an option as it is declared; torchrun's have an underscore, too."""
    name = name.replace("_", "-")
    if name in _REFUSED:
        raise typer.BadParameter(f"torchrun's --{name} has no equal here: {_REFUSED[name]}")
    return name


@command(
    "dist-ckpt run --nproc-per-node 4 --spares 1 train.py",
    "0 all ranks ended with 0, 1 gave up, 2 wrong usage, 87 a node or the store is missing, "
    "88 this node has left the job or the store is lost: start it again, 89 ended by a signal, and "
    "ranks had to be killed, 130 interrupted, 128 plus its number for another signal.",
    context_settings={
        "allow_interspersed_args": False,
        "auto_envvar_prefix": "PET",  # as torchrun
        "token_normalize_func": _option,
    },
)
def run(
    script: Script = "",
    args: Args = None,
    *,
    nproc_per_node: NprocPerNode = "1",
    spares: Spares = 0,
    max_restarts: MaxRestarts = 16,
    heartbeat_timeout: HeartbeatTimeout = 30.0,
    shutdown_timeout: ShutdownTimeout = 30.0,
    standalone: Standalone = False,
    nnodes: NumNodes = "1",
    node_rank: NodeRank = None,
    rdzv_backend: Backend = "c10d",
    rdzv_endpoint: Endpoint = "",
    master_addr: MasterAddr = None,
    master_port: MasterPort = 29500,
    rdzv_id: JobId = "none",
    store_only: StoreOnly = False,
    spare_nodes: SpareNodes = 0,
    node_ttl: NodeTtl = 10.0,
    node_wait: NodeWait = 600.0,
    log_dir: LogDir = None,
    redirects: Redirects = "0",
    tee: Tee = "0",
    local_ranks_filter: LocalRanks = "",
    event_log_handler: EventLogHandler = "null",
    role: Role = "default",
    signals_to_handle: Signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    no_python: NoPython = False,
    is_module: IsModule = False,
    monitor_interval: WithoutEffect = None,
    start_method: WithoutEffect = None,
    local_addr: WithoutEffect = None,
    debug: Debug = False,
) -> int:
    """Run a training script on the ranks of this node, and replace workers that die.

    The others stay alive: with HPWrapper around its training the script continues in place. All
    arguments after SCRIPT are the script's. A dead worker is noticed at once, a hung one after
    --heartbeat-timeout. In scripts that call wait_rank(), spares wait with everything imported.

    Run the same command on each of several nodes. If a node is lost, a spare node takes its place.
    """
    from dist_ckpt_strategies.cli import run as launcher  # noqa: PLC0415
    from dist_ckpt_strategies.inprocess.job import Job  # noqa: PLC0415

    kind = {"is_module": is_module, "is_program": no_python, "is_store_only": store_only}
    words = launcher.command_of(script, args or (), **kind)
    num_ranks = launcher.ranks_of(nproc_per_node)
    options: dict[str, Any] = {"run_id": rdzv_id, "ttl_s": node_ttl, "wait_s": node_wait}
    options |= {"node_rank": node_rank, "num_spare_nodes": spare_nodes, "is_store_only": store_only}
    where = rdzv_endpoint or (f"{master_addr}:{master_port}" if master_addr else "")
    where = "" if standalone else where
    nodes = launcher.nodes_of(nnodes, where, rdzv_backend, num_ranks, **options)
    limits = num_ranks, spares, max_restarts, heartbeat_timeout, shutdown_timeout
    signals = launcher.signals_of(signals_to_handle)
    job = Job(words, *limits, nodes, event_log_handler, role, signals)
    return launcher.run_script(job, log_dir, redirects, tee, local_ranks_filter)
