"""Save and load one GPT-like state in an object store, beside plain puts and gets of its bytes.

    python benchmarks/object_stores.py --out object_stores.jsonl
    python benchmarks/object_stores.py --smoke --server moto

The server, Ceph's radosgw or moto, is started for the benchmark on this machine, keeps its objects
in memory, and shares the cores with the ranks. Two ranks, alternating contenders, medians; every
load is checked; the first round is not counted. The floors put and get the same bytes, one object
for each shard or 64 MiB of it, with as many requests at the same time as format 2 has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer

from benchmarks.contenders.roster import RAW_PUT, STORE_PACKAGES
from benchmarks.measuring.command_line import Contest, Output, Where, among, contest_command
from benchmarks.measuring.disks import touch_memory, workspace
from benchmarks.measuring.gpt_state import GptSize
from benchmarks.measuring.harness import Ranks, alternate, made_in
from benchmarks.measuring.measures import (
    SECONDS,
    Measure,
    build_measure_table,
    ratio_column,
    seconds_column,
    summarise_measures,
)
from benchmarks.measuring.rounds import load_rounds
from benchmarks.measuring.store_site import (
    MOTO,
    RADOSGW,
    StoreSite,
    delete_below,
    open_store,
    why_not,
)
from benchmarks.measuring.timings import Case, Step

SAVE, LOAD = "save", "load"
_WORKER = "benchmarks.ranks.object_stores"
_NUM_RANKS = 2
_BUCKET = "bench"
_REQUEST_TIMEOUT_S = "120"
_NOWHERE = Path("/nowhere")
"""No file lies there: of such a path only the last part counts, as the name in the bucket."""


def run_server(server: str, directory: Path, contest: Contest, output: Output) -> None:
    """Time every size against a server of its own, and report it."""
    for size in contest.sizes:
        place = directory / f"{server}-{size.hidden}"
        place.mkdir()
        with open_store(server, place) as store:
            os.environ.update(store.variables | {"DIST_CKPT_STORE_TIMEOUT_S": _REQUEST_TIMEOUT_S})
            store.make_bucket(_BUCKET)
            site = StoreSite(server, store.endpoint, _BUCKET)
            run_size(size, site, store.client(), contest, output)


def run_size(size: GptSize, site: StoreSite, client: Any, contest: Contest, output: Output) -> None:
    """Time one size, and report it."""
    names = contest.names
    make = made_in(_WORKER, size, names, site)
    with Ranks(_NUM_RANKS, make, timeout_s=contest.timeout_s, preload=(_WORKER,)) as ranks:
        nbytes = sum(ranks.step("nbytes").values)
        case = Case(site.server, nbytes, size.num_arrays, _NUM_RANKS)
        measures = output.write_samples(case, _rounds(ranks, case, client, contest))
    summaries = summarise_measures(measures, names, names[: names.index("zarr 2")])
    columns = (seconds_column(), *(ratio_column(floor) for floor in summaries[0].ratios))
    table = build_measure_table(f"{case}: median seconds, ratios", summaries, columns)
    output.write_summaries(case, summaries, table)


def _rounds(ranks: Ranks, case: Case, client: Any, contest: Contest) -> Iterator[Measure]:
    """Saves, the last of which stay, and loads of those."""
    for repetition, name in alternate(contest.names, contest.repetitions + 1):
        delete_below(client, _BUCKET, name)
        touch_memory(case.held_nbytes)
        seconds = ranks.step("save", name, _NOWHERE / name).seconds
        if repetition > 0:
            yield Measure(SAVE, name, repetition, {SECONDS: seconds})
    stored = {name: _NOWHERE / name for name in contest.names}
    for sample in load_rounds(ranks, case, Step.LOAD_WARM, stored, contest.repetitions):
        yield Measure(LOAD, sample.contender, sample.repetition, {SECONDS: sample.seconds})


@contest_command(STORE_PACKAGES, (RAW_PUT,), where=Where.DISK)
def main(
    contest: Contest,
    output: Output,
    *,
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="radosgw or moto.",
            show_default="radosgw, else moto",
            callback=among((RADOSGW, MOTO)),
        ),
    ] = None,
) -> None:
    """Save and load one GPT-like state in an object store with every contender in turn.

    What is written to a directory are the server's own files.
    """
    for place in contest.places:
        for one in server or [MOTO if why_not(RADOSGW) else RADOSGW]:
            if reason := why_not(one):
                output.skip(one, reason)
            else:
                with workspace(place) as directory:
                    run_server(one, directory, contest, output)


if __name__ == "__main__":
    typer.run(main)
