"""The ``dist-ckpt`` command: its arguments, its help and its exit status.

What a command needs is imported when it runs, so that help appears at once and ``inspect`` and
``verify`` never load torch.
"""

import platform
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import typer

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.ranks import CLI, needs_ranks, run_ranks
from dist_ckpt_strategies.cli.status import reported_failures, require_answers
from dist_ckpt_strategies.config import environment, update_environment
from dist_ckpt_strategies.errors import PlanError

_CONVERT_STATUS = (
    "0 done, 1 SRC is damaged or incomplete, also where the rest was converted, 2 wrong usage, "
    "3 could not read or write."
)


def _epilog(example: str, status: str) -> str:
    return f"Example: [bold]{example}[/]\n\n[bold]Exit status:[/] {status}"


app = typer.Typer(
    name="dist-ckpt",
    help="Inspect, verify, convert, compare and prune checkpoints of Megatron-Core, and run "
    "training that survives failing ranks.",
    epilog=_epilog(
        "dist-ckpt inspect /checkpoints/iter_0000100",
        "0 fine, 1 damaged, incomplete or different, 2 wrong usage, 3 could not read or write.",
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _command(
    example: str, status: str, **options: Any
) -> Callable[[Callable[..., int | None]], object]:
    """Register a command: its docstring is its help, its result the exit status (None for 0).

    A failure becomes a status and one line on stderr, or with ``--debug`` a traceback.
    """

    def register(function: Callable[..., int | None]) -> object:
        @wraps(function)
        def run(**arguments: Any) -> None:
            with reported_failures(debug=arguments["debug"]):
                nproc = arguments.get("nproc")
                if needs_ranks(nproc):
                    status: int | None = run_ranks(nproc, CLI, sys.argv[1:])
                else:
                    status = function(**arguments)
            raise typer.Exit(status or 0)

        paragraphs = cleandoc(function.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)
        return app.command(help=text, epilog=_epilog(example, status), **options)(run)

    return register


def _argument(metavar: str, help: str) -> Any:  # noqa: A002 - as typer calls it
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def _flag(*names: str, help: str) -> Any:  # noqa: A002
    """An option without a value, and without a placeholder for one."""
    return typer.Option(*names, metavar="", help=help)


def _value(*names: str, metavar: str, help: str, **limits: Any) -> Any:  # noqa: A002
    """An option with a value that has no default."""
    return typer.Option(*names, metavar=metavar, help=help, show_default=False, **limits)


_Place = Annotated[
    str, _argument("DIR", "Directory or URL of one checkpoint, or directory of local ones.")
]
_Source = Annotated[str, _argument("SRC", "Directory or URL of a checkpoint.")]
_Target = Annotated[str, _argument("DST", "New or empty directory, or a URL.")]
_Json = Annotated[bool, _flag("--json", help="Print one JSON object instead.")]
_Debug = Annotated[
    bool, _flag("--debug", help="Show a traceback on failure, as DIST_CKPT_DEBUG=1 does.")
]
_Memory = Annotated[
    int | None,
    _value(
        metavar="MIB",
        min=1,
        help="Bound on elements in memory at once, in MiB for each process (512, or "
        "DIST_CKPT_MAX_INFLIGHT_BYTES).",
    ),
]
_Keys = Annotated[
    str | None, _value(metavar="GLOB", help="Only arrays and objects whose keys match.")
]
_Nproc = Annotated[
    int | None,
    _value(
        "--nproc",
        "-n",
        metavar="N",
        min=1,
        help="Share the work among N processes of this node; under torchrun its ranks share it.",
    ),
]


def main() -> None:
    """Run the command line and exit with its status: the console script ``dist-ckpt``."""
    # Without Transformer Engine, which no command needs, Megatron-Core's import warns of it.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    app(prog_name="dist-ckpt")


def _prepare(*addresses: str) -> None:
    """Require that object stores answer, and let torch's libraries report errors alone."""
    if "TORCH_CPP_LOG_LEVEL" not in environment():
        update_environment({"TORCH_CPP_LOG_LEVEL": "ERROR"})
    require_answers(*addresses)


def _show_version(asked: bool) -> None:  # noqa: FBT001 - typer calls it
    if asked:
        found = [f"{name} {version(name)}" for name in ("megatron-core", "torch", "tensorstore")]
        found.append(f"Python {platform.python_version()}")
        typer.echo(f"dist-ckpt {dist_ckpt_strategies.__version__} ({', '.join(found)})")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            metavar="",
            help="Show the versions.",
        ),
    ] = False,
) -> None:
    pass


@_command(
    "dist-ckpt inspect DIR --keys 'decoder.*'",
    "0 complete, 1 incomplete or damaged, 2 wrong usage, 3 could not read.",
)
def inspect(
    directory: _Place,
    *,
    keys: Annotated[
        str | None,
        _value(
            metavar="GLOB",
            help="Show only keys, or local shards, that match; * stands for any characters, / and "
            ". too.",
        ),
    ] = None,
    objects: Annotated[bool, _flag(help="Show the objects below the arrays.")] = True,
    as_json: _Json = False,
    debug: _Debug = False,
) -> int:
    """List the arrays and objects of a checkpoint, and say whether it is complete.

    For a directory of local checkpoints it lists iterations and local shards. Reads names, sizes
    and metadata only.
    """
    from dist_ckpt_strategies.cli.inspect import inspect_checkpoint  # noqa: PLC0415

    _prepare(directory)
    return inspect_checkpoint(directory, keys, with_objects=objects, as_json=as_json)


@_command(
    "dist-ckpt verify DIR && rsync -a DIR backup:",
    "0 complete and undamaged, 1 damaged or incomplete, 2 wrong usage, 3 could not read.",
)
def verify(
    directory: _Place, *, nproc: _Nproc = None, as_json: _Json = False, debug: _Debug = False
) -> int:
    """Check that a checkpoint is complete and undamaged, and list all damage.

    Packs and local checkpoints: every byte is compared with its digest. ("zarr", 1): existence and
    size of every chunk file, and the checksums of objects and common.pt; it has no digests of
    arrays, so a changed byte inside a chunk is not found.
    """
    from dist_ckpt_strategies.cli.inspect import verify_checkpoint  # noqa: PLC0415

    _prepare(directory)
    return verify_checkpoint(directory, nproc=nproc, as_json=as_json)


@_command(
    "dist-ckpt rebuild-index DIR",
    "0 done, or the index is whole, 1 no save is whole, 2 wrong usage, 3 could not read or write.",
    name="rebuild-index",
)
def rebuild_index(
    directory: Annotated[str, _argument("DIR", "Directory or URL of one checkpoint.")],
    *,
    force: Annotated[bool, _flag("--force", help="Replace an index that is whole, too.")] = False,
    as_json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Make the lost or damaged index of packs anew, from the packs alone.

    Of the saves whose packs are there, the newest whole one counts; shows which it is. Nothing is
    deleted; metadata.json and common.pt are written anew. No save may be under way. Reads headers
    and digests: run verify afterwards.
    """
    from dist_ckpt_strategies.cli.rebuild_index import rebuild  # noqa: PLC0415

    _prepare(directory)
    rebuild(directory, is_forced=force, as_json=as_json)


@_command(
    "dist-ckpt prune ROOT --keep-last 3 --unfinished",
    "0 done, 2 wrong usage, 3 could not read ROOT, or remove.",
)
def prune(
    root: Annotated[str, _argument("ROOT", "Directory or URL that holds the checkpoints.")],
    *,
    keep_last: Annotated[
        int | None, _value(min=1, metavar="N", help="Keep the N newest complete ones.")
    ] = None,
    keep_every: Annotated[
        int | None, _value(min=1, metavar="N", help="Keep those of every N-th iteration.")
    ] = None,
    keep_best: Annotated[
        str | None,
        _value(metavar="METRIC:MODE:N", help="Keep the N best of a manager's: loss:min:3."),
    ] = None,
    unfinished: Annotated[
        bool, _flag("--unfinished", help="Remove what killed saves left behind.")
    ] = False,
    older_than: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Keep unfinished ones that changed within this time: they may be in progress.",
        ),
    ] = "1h",
    dry_run: Annotated[bool, _flag("--dry-run", help="Only show what would be removed.")] = False,
    yes: Annotated[bool, _flag("--yes", help="Do not prompt.")] = False,
    as_json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Remove old checkpoints, and what killed saves left behind.

    ROOT contains the checkpoints, each in a directory; its iteration is the last number in its
    name. The newest complete one is always kept, and so is everything that has no iteration in its
    name, or is neither a checkpoint of ("safetensors", 1) or ("zarr", 1) nor left by a killed save
    of these. Shows what would be removed, and prompts.
    """
    from dist_ckpt_strategies.cli.prune import parse_keep_best, prune_checkpoints  # noqa: PLC0415

    _prepare(root)
    best = keep_best and parse_keep_best(keep_best)
    rules = {"keep_last": keep_last, "keep_every": keep_every, "keep_best": best}
    rules |= {"unfinished": unfinished}
    prune_checkpoints(
        root, rules, older_than=older_than, dry_run=dry_run, is_agreed=yes, as_json=as_json
    )


@_command(
    "dist-ckpt demo --keep demo-checkpoint",
    "0 all states are equal, 1 a state differs, 2 wrong usage, 3 no space.",
)
def demo(
    *,
    keep: Annotated[
        Path | None,
        _value(
            metavar="DIR",
            help="Leave the checkpoint in this directory, which must be new or empty.",
        ),
    ] = None,
    debug: _Debug = False,
) -> int:
    """Train a small GPT on four CPU ranks, save it as Zarr, resume it in other layouts.

    Shows that weights and optimizer state are loaded bit for bit, and that the loss continues from
    its value at the save. Takes a few minutes on two cores.
    """
    from rich.console import Console  # noqa: PLC0415

    from dist_ckpt_strategies.cli.demo.main import run_demo  # noqa: PLC0415

    return run_demo(keep, Console())


@_command("dist-ckpt convert SRC DST --to torch_dist", _CONVERT_STATUS)
def convert(
    source: _Source,
    target: _Target,
    *,
    to: Annotated[
        str, _value(metavar="FORMAT", help="pack, zarr@1, zarr@3, torch_dist or safetensors.")
    ],
    keys: _Keys = None,
    skip_damaged: Annotated[
        bool, _flag("--skip-damaged", help="Leave out what is damaged, and list it.")
    ] = False,
    max_file: Annotated[
        int | None,
        _value(
            metavar="MB",
            min=1,
            help="Size of a file of safetensors (5000), a pack or torch_dist (537), in MB.",
        ),
    ] = None,
    memory: _Memory = None,
    nproc: _Nproc = None,
    as_json: _Json = False,
    debug: _Debug = False,
) -> int:
    """Convert a checkpoint to another format, bit for bit.

    From and to pack, which is ("safetensors", 1); ("zarr", 1); plain Zarr v3; torch_dist of
    Megatron-Core 0.16; and files of safetensors with whole arrays of a model, without optimizer
    state, objects and common state. Memory is bounded. DST must be new or empty; nothing is visible
    there until the conversion is complete. After an interruption the same command starts over.
    """
    _prepare(source, target)
    from dist_ckpt_strategies.cli.convert import convert_checkpoint  # noqa: PLC0415

    arguments: dict[str, Any] = {"source": source, "target": target, "to": to, "keys": keys}
    arguments |= {"skip_damaged": skip_damaged, "max_file": max_file, "memory": memory}
    return convert_checkpoint("convert", arguments, nproc, as_json=as_json)


@_command("dist-ckpt copy SRC s3://bucket/run/iter_0000100 --keys 'model.*'", _CONVERT_STATUS)
def copy(
    source: _Source,
    target: _Target,
    *,
    keys: _Keys = None,
    memory: _Memory = None,
    nproc: _Nproc = None,
    as_json: _Json = False,
    debug: _Debug = False,
) -> int:
    """Copy a checkpoint, or a part of it, in its own format.

    Only the bytes of the keys that match are read, and the common state. Those of packs are
    compared with their digests, which are copied. Otherwise like convert.
    """
    _prepare(source, target)
    from dist_ckpt_strategies.cli.convert import convert_checkpoint  # noqa: PLC0415

    arguments = {"source": source, "target": target, "keys": keys, "memory": memory}
    return convert_checkpoint("copy", arguments, nproc, as_json=as_json)


@_command("dist-ckpt upgrade SRC DST --to pack", _CONVERT_STATUS)
def upgrade(
    source: _Source,
    target: _Target,
    *,
    to: Annotated[
        str | None,
        _value(
            metavar="FORMAT",
            help="pack, zarr@1, zarr@3 or torch_dist; by default the format of SRC.",
        ),
    ] = None,
    memory: _Memory = None,
    nproc: _Nproc = None,
    as_json: _Json = False,
    debug: _Debug = False,
) -> int:
    """Convert a checkpoint of Megatron-Core <= 0.15 or NeMo 1.x so that training can continue.

    Optimizer state of the form fully_sharded_model_space (optimizer.state.fp32_param.*), which
    Megatron-Core 0.16 cannot load, becomes fully_reshardable (optimizer.state.param.*). Otherwise
    like convert.
    """
    _prepare(source, target)
    from dist_ckpt_strategies.cli.convert import convert_checkpoint  # noqa: PLC0415

    arguments = {"source": source, "target": target, "to": to, "memory": memory}
    return convert_checkpoint("upgrade", arguments, nproc, as_json=as_json)


@_command(
    "dist-ckpt diff A B --keys 'decoder.*'",
    "0 equal, 1 different, or one is damaged or incomplete, 2 wrong usage, 3 could not read.",
)
def diff(
    a: Annotated[str, _argument("A", "A checkpoint.")],
    b: Annotated[str, _argument("B", "Another checkpoint.")],
    *,
    keys: Annotated[
        str | None,
        _value(metavar="GLOB", help="Compare only arrays whose keys match, and no objects."),
    ] = None,
    memory: _Memory = None,
    nproc: _Nproc = None,
    as_json: _Json = False,
    debug: _Debug = False,
) -> int:
    """Compare two checkpoints of any formats: keys, shapes, dtypes, elements and objects.

    For each array that differs it shows the first such element, their number, and the largest
    absolute difference. Equal means equal to the bit. Blocks of packs are compared by their
    digests, and read if these differ. Damage is a difference too. After upgrade, arrays are
    compared under both names.
    """
    _prepare(a, b)
    from dist_ckpt_strategies.cli.convert import diff_checkpoints  # noqa: PLC0415

    arguments = {"a": a, "b": b, "keys": keys, "memory": memory}
    return diff_checkpoints(arguments, nproc, as_json=as_json)


@_command(
    "dist-ckpt bench /checkpoints --size 2", "0 measured, 2 wrong usage, 3 could not measure."
)
def bench(
    directory: Annotated[
        Path | None, _argument("DIR", "A directory on the file system to measure.")
    ] = None,
    *,
    size: Annotated[
        float, typer.Option(metavar="GB", min=0.001, help="Size of the state, all ranks together.")
    ] = 0.25,
    ranks: Annotated[int, typer.Option(metavar="N", min=1, help="Processes on this node.")] = 2,
    repetitions: Annotated[
        int, typer.Option(metavar="N", min=1, help="Measured rounds, after one for warm-up.")
    ] = 3,
    as_json: _Json = False,
    debug: _Debug = False,
) -> int:
    """Measure saves and loads on the file system of DIR; the baseline is one stream per rank.

    CPU ranks save and load a GPT-like state with ("zarr", 1), packs and torch_dist, in turn.
    All files are flushed when a save ends, and dropped from the page cache before a load if the
    kernel can do that. Every load is compared with what was saved. All files are removed at the
    end. The default is the temporary directory, which may be in memory.
    """
    from dist_ckpt_strategies.cli.bench import GB, bench_directory  # noqa: PLC0415

    nbytes = round(size * GB)
    return bench_directory(directory, nbytes, ranks, repetitions, json=as_json, debug=debug)


@_command(
    "dist-ckpt run --nproc-per-node 4 --spares 1 train.py",
    "0 all ranks ended with 0, 1 gave up, 2 wrong usage, 87 a node or the store is missing, "
    "88 this node has left the job or the store is lost: start it again, 89 ended by a signal, and "
    "ranks had to be killed, 130 interrupted, 128 plus its number for another signal.",
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),  # as torchrun
    },
)
def run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module.")
    ] = "",
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")
    ] = None,
    *,
    nproc_per_node: Annotated[
        str,
        typer.Option(
            "--nproc-per-node",
            "--nproc",
            "-n",
            metavar="N",
            help="Ranks of each node; gpu, cpu or auto: one per device.",
        ),
    ] = "1",
    spares: Annotated[
        int,
        typer.Option(
            metavar="S",
            min=0,
            help="Processes per node that wait in wait_rank() to take over a rank. A script that "
            "does not call it would run in each of them as a job of its own.",
        ),
    ] = 0,
    max_restarts: Annotated[
        int, typer.Option(metavar="R", min=0, help="Workers that may be replaced, in total.")
    ] = 16,
    heartbeat_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Seconds without a heartbeat before a worker counts as hung; 0: no check.",
        ),
    ] = 30.0,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            envvar="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            help="How long workers may take to save and end after a signal; then they are killed.",
        ),
    ] = 30.0,
    nnodes: Annotated[str, typer.Option(metavar="N", help="Nodes that have ranks.")] = "1",
    node_rank: Annotated[
        int | None, _value(metavar="N", min=0, help="The node's place in the job, if it is vacant.")
    ] = None,
    rdzv_backend: Annotated[str, typer.Option(metavar="NAME", help="c10d: a TCPStore.")] = "c10d",
    rdzv_endpoint: Annotated[
        str,
        _value(
            metavar="HOST[:PORT]",
            help="Where the nodes find each other: a store, hosted by the agent whose address it "
            "is.",
        ),
    ] = "",
    rdzv_id: Annotated[str, typer.Option(metavar="ID", help="Name of the job.")] = "none",
    store_only: Annotated[
        bool, _flag("--store-only", help="Host the store, and run no ranks; takes no SCRIPT.")
    ] = False,
    spare_nodes: Annotated[
        int,
        typer.Option(
            metavar="S",
            min=0,
            help="Nodes that wait to take a lost node's place. The script must call wait_rank().",
        ),
    ] = 0,
    node_ttl: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="Seconds without a renewal of its place after which a node is lost.",
        ),
    ] = 10.0,
    node_wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="How long the job waits for a node, at first or in a lost one's place.",
        ),
    ] = 600.0,
    log_dir: Annotated[
        str | None, _value(metavar="DIR", help="Directory for the files of --redirects and --tee.")
    ] = None,
    redirects: Annotated[
        str,
        typer.Option(
            metavar="STD",
            help="Write output to files: 1 stdout, 2 stderr, 3 both; 0:1,1:2 by local rank.",
        ),
    ] = "0",
    tee: Annotated[
        str, typer.Option(metavar="STD", help="Write output to files and to the terminal.")
    ] = "0",
    event_log_handler: Annotated[
        str, _value(metavar="NAME", help="Where torch's events go: null or console.")
    ] = "null",
    is_module: Annotated[bool, _flag("--module", "-m", help="SCRIPT names a module.")] = False,
    debug: _Debug = False,
) -> int:
    """Run a training script on the ranks of this node, and replace workers that die.

    The others stay alive: with HPWrapper around its training the script continues in place. All
    arguments after SCRIPT are the script's. A dead worker is noticed at once, a hung one after
    --heartbeat-timeout. In scripts that call wait_rank(), spares wait with everything imported.

    Run the same command on each of several nodes. If a node is lost, a spare node takes its place.
    """
    from dist_ckpt_strategies.cli.run import nodes_of, ranks_of, run_script  # noqa: PLC0415
    from dist_ckpt_strategies.inprocess.job import Job, script_command  # noqa: PLC0415

    if store_only and script:
        raise PlanError(f"--store-only: the store's process runs no script, found {script}")
    if not is_module and not store_only and not Path(script).is_file():
        raise PlanError(f"SCRIPT: expected a Python file, found {script or 'nothing'}")
    num_ranks = ranks_of(nproc_per_node)
    nodes = nodes_of(
        nnodes,
        rdzv_endpoint,
        rdzv_backend,
        num_ranks,
        num_spare_nodes=spare_nodes,
        run_id=rdzv_id,
        ttl_s=node_ttl,
        wait_s=node_wait,
        node_rank=node_rank,
        is_store_only=store_only,
    )
    command = script_command(script, args or (), is_module=is_module)
    job = Job(
        command,
        num_ranks,
        spares,
        max_restarts,
        heartbeat_timeout,
        shutdown_timeout,
        nodes=nodes,
        event_log_handler=event_log_handler,
    )
    return run_script(job, log_dir=log_dir, redirects=redirects, tee=tee)
