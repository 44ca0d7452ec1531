"""``dist-ckpt rebuild-index``: make the index of packs anew."""

from dataclasses import asdict

import typer

from dist_ckpt_strategies.cli.render import counted, print_json, printable
from dist_ckpt_strategies.formats.locations import located
from dist_ckpt_strategies.formats.rebuild import rebuild_index


def rebuild(address: str, *, is_forced: bool, as_json: bool) -> None:
    """Make the index anew, and show for which save."""
    place = located(address, None)
    rebuilt = rebuild_index(place, force=is_forced)
    if as_json:
        fields = {"rebuilt": rebuilt is not None} | (asdict(rebuilt) if rebuilt else {})
        print_json("rebuild-index", {"path": str(place), **fields})
        return
    if rebuilt is None:
        typer.echo(printable(f"{place}: the index is whole, and stays"))
        return
    for text in rebuilt.passed_over:
        typer.echo(printable(f"passed over: {text}"))
    counts = f"{counted(rebuilt.num_packs, 'pack')}, {counted(rebuilt.num_arrays, 'array')} and "
    counts += counted(rebuilt.num_objects, "object")
    save = f"save {rebuilt.save_id}" if rebuilt.save_id else "a save without an id"
    typer.echo(printable(f"{place}: made the index of {save}: {counts}"))
