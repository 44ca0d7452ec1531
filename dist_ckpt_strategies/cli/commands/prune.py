"""Arguments of ``prune``."""

from typing import Annotated

import typer

from dist_ckpt_strategies.cli.command import Debug, Json, argument, command, flag, prepare, value


@command(
    "dist-ckpt prune ROOT --keep-last 3 --unfinished",
    "0 done, 2 wrong usage, 3 could not read ROOT, or remove.",
)
def prune(
    root: Annotated[str, argument("ROOT", "Directory or URL that holds the checkpoints.")],
    *,
    keep_last: Annotated[
        int | None, value(min=1, metavar="N", help="Keep the N newest complete ones.")
    ] = None,
    keep_every: Annotated[
        int | None, value(min=1, metavar="N", help="Keep those of every N-th iteration.")
    ] = None,
    keep_best: Annotated[
        str | None,
        value(
            metavar="METRIC:MODE:N", help="Keep the N best by a metric of the saves: loss:min:3."
        ),
    ] = None,
    unfinished: Annotated[
        bool, flag("--unfinished", help="Remove what killed saves left behind.")
    ] = False,
    older_than: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Keep unfinished ones that changed within this time: they may be in progress.",
        ),
    ] = "1h",
    dry_run: Annotated[bool, flag("--dry-run", help="Only show what would be removed.")] = False,
    yes: Annotated[bool, flag("--yes", help="Do not prompt.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove old checkpoints, and what killed saves left behind.

    ROOT contains the checkpoints, each in a directory; its iteration is the last number in its
    name. The newest complete one is always kept, and so is everything that has no iteration in its
    name, or is neither a checkpoint of ("safetensors", 1) or ("zarr", 1) nor left by a killed save
    of these. Shows what would be removed, and prompts.
    """
    from dist_ckpt_strategies.cli.prune import parse_keep_best, prune_checkpoints  # noqa: PLC0415

    prepare(root)
    best = keep_best and parse_keep_best(keep_best)
    rules = {"keep_last": keep_last, "keep_every": keep_every, "keep_best": best}
    rules |= {"unfinished": unfinished}
    prune_checkpoints(
        root, rules, older_than=older_than, dry_run=dry_run, is_agreed=yes, as_json=as_json
    )
