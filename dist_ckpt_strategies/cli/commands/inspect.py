"""Arguments of ``inspect``, ``verify`` and ``rebuild-index``."""

from typing import Annotated

from dist_ckpt_strategies.cli.command import (
    Debug,
    Json,
    Nproc,
    Place,
    argument,
    command,
    flag,
    prepare,
    value,
)


@command(
    "dist-ckpt inspect DIR --keys 'decoder.*'",
    "0 complete, 1 incomplete or damaged, 2 wrong usage, 3 could not read.",
)
def inspect(
    directory: Place,
    *,
    keys: Annotated[
        str | None,
        value(
            metavar="GLOB",
            help="Show only keys, or local shards, that match; * stands for any characters, / and "
            ". too.",
        ),
    ] = None,
    objects: Annotated[bool, flag(help="Show the objects below the arrays.")] = True,
    stats: Annotated[
        bool,
        flag(
            "--stats",
            help="Read the arrays, of any format, and show min, max, mean, and the shares of NaN "
            "and zeros.",
        ),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """List the arrays and objects of a checkpoint, and say whether it is complete.

    For a directory of local checkpoints it lists iterations and local shards. Reads names, sizes
    and metadata only; with --stats every element once, in blocks, and what has digests is verified.
    """
    from dist_ckpt_strategies.cli.inspect import inspect_checkpoint, inspect_stats  # noqa: PLC0415

    prepare(directory)
    if stats:
        return inspect_stats(directory, keys, as_json=as_json)
    return inspect_checkpoint(directory, keys, with_objects=objects, as_json=as_json)


@command(
    "dist-ckpt verify DIR && rsync -a DIR backup:",
    "0 complete and undamaged, 1 damaged or incomplete, 2 wrong usage, 3 could not read.",
)
def verify(
    directory: Place, *, nproc: Nproc = None, as_json: Json = False, debug: Debug = False
) -> int:
    """Check that a checkpoint is complete and undamaged, and list all damage.

    Packs and local checkpoints: every byte is compared with its digest. ("zarr", 1): existence and
    size of every chunk file, and the checksums of objects and common.pt; it has no digests of
    arrays, so a changed byte inside a chunk is not found.
    """
    from dist_ckpt_strategies.cli.inspect import verify_checkpoint  # noqa: PLC0415

    prepare(directory)
    return verify_checkpoint(directory, nproc=nproc, as_json=as_json)


@command(
    "dist-ckpt rebuild-index DIR",
    "0 done, or the index is whole, 1 no save is whole, 2 wrong usage, 3 could not read or write.",
    name="rebuild-index",
)
def rebuild_index(
    directory: Annotated[str, argument("DIR", "Directory or URL of one checkpoint.")],
    *,
    force: Annotated[bool, flag("--force", help="Replace an index that is whole, too.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make the lost or damaged index of packs anew, from the packs alone.

    Of the saves whose packs are there, the newest whole one counts; shows which it is. Nothing is
    deleted; metadata.json and common.pt are written anew. No save may be under way. Reads headers
    and digests: run verify afterwards.
    """
    from dist_ckpt_strategies.cli.inspect import rebuild  # noqa: PLC0415

    prepare(directory)
    rebuild(directory, is_forced=force, as_json=as_json)
