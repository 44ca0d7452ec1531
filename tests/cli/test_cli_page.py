"""What docs/cli.md shows of the output of commands is what they print."""

from __future__ import annotations

import os
import re
import shlex
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from rich.console import Console
from typer.testing import CliRunner

from dist_ckpt_strategies.cli.app import app
from dist_ckpt_strategies.cli.bench import build_table
from dist_ckpt_strategies.cli.render import print_table
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.formats.commit import write_marker
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.formats.objects import dump_object
from dist_ckpt_strategies.sharded.save_cache import SaveCache
from dist_ckpt_strategies.storage.files import PARTIAL_PREFIX
from tests.cli.test_local import write_part
from tests.support.checkpoints import (
    flip_at,
    golden_archives,
    unpack,
    write_checkpoint,
    write_metadata,
)
from tests.support.formats import save_format2
from tests.support.pages import ROOT, blocks_of
from tests.support.thread_ranks import run_ranks

SHOWN = [text for language, text in blocks_of(ROOT / "docs" / "cli.md") if language == "text"]
NUM_RANKS = 4
VARIES = (
    (r"\d[\d.]* s\b", "SECONDS"),
    (r"\d[\d.]* [kMG]?B/s", "SPEED"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC on \S+?(?=,|$)", "WHEN AND WHERE"),
    (r"(?<=written by  ).*", "VERSIONS"),
    (r"(?<=layout      ranks 4).*", ""),
)
"""What is another on another day or machine, or in a job that Megatron-Core has laid out."""


def constant(text: str) -> list[str]:
    for pattern, name in VARIES:
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    return [line.rstrip() for line in text.strip().splitlines()]


def shown(beginning: str) -> list[str]:
    """The one text block of the page that begins so."""
    (found,) = [text for text in SHOWN if text.startswith(beginning)]
    return constant(found)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is ``/checkpoints`` and ``/local/checkpoints`` on the page."""
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def printed(place: Path, command: str, answer: str = "") -> list[str]:
    """What a command of the page prints, with the page's own places in it."""
    for theirs in ("/local/checkpoints", "/checkpoints"):
        command = command.replace(theirs, str(place))
    result = CliRunner().invoke(app, shlex.split(command)[1:], input=answer)
    root = "/local/checkpoints" if (place / "run-7").exists() else "/checkpoints"
    return constant(result.output.replace(str(place), root))


def write_format1(place: Path) -> Path:
    """What Megatron-Core 0.12.3 has saved."""
    unpack(golden_archives()["m0123_tp4_modelonly"], place / "unpacked").rename(
        place / "iter_0000100"
    )
    return place / "iter_0000100"


def state_of(rank: int) -> dict[str, Any]:
    weight = torch.arange(128 * 512, dtype=torch.float32).reshape(128, 512) + rank
    moment = torch.arange(291 if rank < 3 else 264, dtype=torch.float32)
    objects: dict[str, Any] = {"rerun_state": {"mode": "disabled"}, "rng_state": torch.ones(994)}
    return {
        "weight": ShardedTensor.from_rank_offsets("decoder.weight", weight, (0, rank, NUM_RANKS)),
        "moment": ShardedTensor(
            key="optimizer.state.exp_avg",
            data=moment,
            dtype=moment.dtype,
            local_shape=tuple(moment.shape),
            global_shape=(1137,),
            global_offset=(291 * rank,),
            axis_fragmentations=None,
        ),
    } | {key: ShardedObject(key, held, (NUM_RANKS,), (rank,)) for key, held in objects.items()}


def write_format2(place: Path, *, is_finished: bool = True) -> Path:
    """What four ranks have saved."""
    root = place / "iter_0000200"
    root.mkdir(parents=True)
    (root / "common.pt").write_bytes(dump_object({"iteration": 200}, name="common state"))

    def save(comm: Communicator) -> None:
        save_format2(state_of(comm.rank), root, comm, Options(timeout_s=60.0), SaveCache())

    run_ranks(NUM_RANKS, save)
    if is_finished:
        write_marker(root, CheckpointMarker("zarr", 2))
    return root


def write_parts(place: Path) -> Path:
    """What lies on the node of rank 0, which keeps a copy for rank 2."""
    home = place / "run-7"
    for owner in (0, 2):
        write_part(home, 100, owner, 0)
    return home


def write_run(place: Path) -> None:
    """Four finished checkpoints, and one whose save was killed a day ago."""
    sizes = {800: 1_048_000_000, 900: 8, 1000: 8, 1100: 8, 1150: 412_000_000}
    for number, nbytes in sizes.items():
        root = place / f"iter_{number:07d}"
        write_checkpoint(root)
        write_metadata(root / "large", shape=[nbytes // 4], chunks=[nbytes // 4])
        with (root / "large" / "0").open("wb") as file:
            file.truncate(nbytes)
    marker = place / "iter_0001150" / "metadata.json"
    marker.rename(marker.with_name(".removed-metadata.json"))
    yesterday = time.time() - 86_400
    for path in (place / "iter_0001150").rglob("*"):
        os.utime(path, (yesterday, yesterday))
    os.utime(place / "iter_0001150", (yesterday, yesterday))


def test_inspect_of_format_1(place: Path) -> None:
    write_format1(place)

    found = printed(place, "dist-ckpt inspect /checkpoints/iter_0000100 --keys '*linear_fc1*'")
    assert found == shown("array                                            shape")


def test_verify_of_format_1(place: Path) -> None:
    root = write_format1(place)
    weight = root / "decoder.layers.mlp.linear_fc1.weight"
    os.truncate(weight / "2.6.0", 4096)
    (weight / "2.5.0").unlink()
    (root / "rng_state" / "shard_0.3_1.4.pt").unlink()

    found = printed(place, "dist-ckpt verify /checkpoints/iter_0000100")
    assert found == shown("decoder.layers.mlp.linear_fc1.weight")


def test_inspect_of_format_2(place: Path) -> None:
    write_format2(place)

    found = printed(place, "dist-ckpt inspect /checkpoints/iter_0000200")
    assert found == shown("array                    shape    dtype    chunk    inner")


def test_inspect_of_a_save_that_was_killed(place: Path) -> None:
    write_format2(place, is_finished=False)

    assert shown("complete    NO, the save")[0] in printed(
        place, "dist-ckpt inspect /checkpoints/iter_0000200"
    )


def test_verify_of_format_2(place: Path) -> None:
    root = write_format2(place)
    (root / "arrays" / "stray").touch()
    with (root / "objects" / "rank-00001.bin").open("ab") as file:
        file.write(b"12")
    flip_at(root / "arrays" / "decoder.weight" / "c.1.0", 131_072)

    found = printed(place, "dist-ckpt verify /checkpoints/iter_0000200")
    assert found == shown("the checkpoint\n  unexpected file    arrays/stray")


def test_inspect_of_local_checkpoints(place: Path) -> None:
    write_parts(place)

    found = printed(place, "dist-ckpt inspect /local/checkpoints/run-7 --keys 'iter_0000100_*'")
    assert found == shown("iteration  ranks here")


def test_verify_of_local_checkpoints(place: Path) -> None:
    home = write_parts(place)
    flip_at(home / "0" / "iter_0000100_2_local_a1.part", 4096)
    (home / "0" / f"{PARTIAL_PREFIX}0123").write_bytes(bytes(4096))

    found = printed(place, "dist-ckpt verify /local/checkpoints/run-7")
    assert found == shown("0/iter_0000100_2_local_a1.part")


def test_prune(place: Path) -> None:
    write_run(place)

    command = "dist-ckpt prune /checkpoints --keep-last 3 --keep-every 1000 --unfinished"
    assert "\n".join(printed(place, command, "n\n")).startswith("\n".join(shown("directory ")))


def test_bench() -> None:
    """The numbers are anybody's; what stands around them is ours."""
    names = ("step", "contender", "seconds", "shortest", "longest", "nbytes_per_second")
    rows = [
        ("save", "one stream", 0.183, 0.182, 0.193, 1.37e9, 1.0),
        ("save", "zarr 1", 0.351, 0.243, 0.444, 712e6, 1.92),
        ("load", "one stream", 0.137, 0.130, 0.142, 1.82e9, 1.0),
        ("load", "zarr 1", 0.185, 0.184, 0.194, 1.36e9, 1.37),
    ]
    timings = [dict(zip((*names, "floor_ratio"), row, strict=True)) for row in rows]
    output = StringIO()
    console = Console(width=100, file=output)
    print_table(console, build_table(timings))
    (page,) = [text for text in SHOWN if text.startswith("/checkpoints: 250 MB")]

    assert [line for line in page.splitlines()[1:] if line != "..."] == [
        line.rstrip() for line in output.getvalue().splitlines()
    ]
