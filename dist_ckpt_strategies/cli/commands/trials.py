"""Arguments of ``demo`` and ``bench``."""

from pathlib import Path
from typing import Annotated

import typer

from dist_ckpt_strategies.cli.command import Debug, Json, argument, command, value


@command(
    "dist-ckpt demo --keep demo-checkpoint",
    "0 all states are equal, 1 a state differs, 2 wrong usage, 3 no space.",
)
def demo(
    *,
    keep: Annotated[
        Path | None,
        value(
            metavar="DIR",
            help="Leave the checkpoint in this directory, which must be new or empty.",
        ),
    ] = None,
    debug: Debug = False,
) -> int:
    """Train a small GPT on four CPU ranks, save it as packs, resume it in other layouts.

    Shows that weights and optimizer state are loaded bit for bit, and that the loss continues from
    its value at the save. Takes a few minutes on two cores.
    """
    from rich.console import Console  # noqa: PLC0415

    from dist_ckpt_strategies.cli.demo.main import run_demo  # noqa: PLC0415

    return run_demo(keep, Console())


@command("dist-ckpt bench /checkpoints --size 2", "0 measured, 2 wrong usage, 3 could not measure.")
def bench(
    directory: Annotated[
        Path | None, argument("DIR", "A directory on the file system to measure.")
    ] = None,
    *,
    size: Annotated[
        float, typer.Option(metavar="GB", min=0.001, help="Size of the state, all ranks together.")
    ] = 0.25,
    ranks: Annotated[int, typer.Option(metavar="N", min=1, help="Processes on this node.")] = 2,
    repetitions: Annotated[
        int, typer.Option(metavar="N", min=1, help="Measured rounds, after one for warm-up.")
    ] = 3,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Measure saves and loads on the file system of DIR; the baseline is one stream per rank.

    CPU ranks save and load a GPT-like state with ("zarr", 1), packs and torch_dist, in turn.
    All files are flushed when a save ends, and dropped from the page cache before a load if the
    kernel can do that. Every load is compared with what was saved. All files are removed at the
    end. The default is the temporary directory, which may be in memory.
    """
    from dist_ckpt_strategies.cli.bench import GB, bench_directory  # noqa: PLC0415
    from dist_ckpt_strategies.cli.ranks import is_rank  # noqa: PLC0415
    from dist_ckpt_strategies.cli.status import Status  # noqa: PLC0415

    nbytes = round(size * GB)
    if directory is not None and is_rank():
        from dist_ckpt_strategies.cli.bench_rank import bench_on_rank  # noqa: PLC0415 - torch

        bench_on_rank(directory.resolve(), nbytes, repetitions, as_json=as_json)
        return Status.FINE
    return bench_directory(directory, nbytes, ranks, repetitions, json=as_json, debug=debug)
