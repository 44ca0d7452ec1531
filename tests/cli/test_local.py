"""``dist-ckpt inspect`` and ``verify`` of local checkpoints: saves, shards, damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from typer.testing import CliRunner, Result

from dist_ckpt_strategies.cli.app import app
from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.local.shard_files import ShardDirectory
from dist_ckpt_strategies.local.shard_format import (
    BufferSpec,
    LocalShard,
    LocalShardId,
    SaveId,
    encode_footer,
)
from dist_ckpt_strategies.storage.files import PARTIAL_PREFIX
from tests.support.checkpoints import flip_at, write_marker

BUFFERS = (
    BufferSpec("model.w", DType.UINT8, (5000,)),
    BufferSpec("model.b", DType.FLOAT32, (2, 5)),
    BufferSpec("rng", DType.UINT8, (100,)),
)
COMMON = b"what all ranks share"


def described(iteration: int, owner: int) -> LocalShard:
    """A shard of a world of four."""
    shard_id = LocalShardId(SaveId(iteration, "a1"), owner)
    return LocalShard(shard_id, 4, "run-7", "basic", BUFFERS)


NBYTES = 5000 + 56 + 40 + 24 + 100 + len(encode_footer(described(100, 0), [0, 0, 0]))


def write_shard(home: Path, iteration: int, owner: int, holder: int) -> Path:
    """The file of a shard."""
    shard = described(iteration, owner)
    writer = ShardDirectory(home).create(shard, holder)
    digests = []
    for number, (buffer, offset) in enumerate(zip(BUFFERS, shard.byte_offsets, strict=True)):
        held = (np.arange(buffer.nbytes) + number + owner).astype(np.uint8)
        writer.write(offset, held)
        digests.append(xxhash.xxh3_64_intdigest(held.data))
    writer.finish(digests)
    return writer.path


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """One session on one node: ranks 0 and 1 keep their shards, and a copy each of 2 and 3."""
    home = tmp_path / "local" / "run-7"
    for iteration in (9, 100):
        for holder, owner in ((0, 0), (0, 2), (1, 1), (1, 3)):
            write_shard(home, iteration, owner, holder)
    write_shard(home, 100, 0, 1)
    return home


def run(command: str, *args: str | Path) -> Result:
    return CliRunner().invoke(app, [command, *map(str, args)])


def as_json(command: str, *args: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(command, *args, "--json").stdout)
    return found


def row_of(result: Result, name: str) -> list[str]:
    (line,) = (line for line in result.stdout.splitlines() if line.startswith(name))
    return line.split()


def test_saves_and_shards_are_listed(session: Path) -> None:
    result = run("inspect", session)

    assert result.exit_code == 0
    assert row_of(result, "100 ")[1:] == ["4", "of", "4", "5", "run-7", "27.4", "kB", "a1"]
    first = row_of(result, "iter_0000100_0_local_a1")
    assert first[1:] == ["0", "4", "0,", "1", "basic", "2", "11.0", "kB"]
    assert "local       2 saves, 8 shards in 9 files" in result.stdout


@pytest.mark.parametrize("place", [".", "..", "0"])
def test_a_root_a_session_and_a_ranks_directory_will_do(place: str, session: Path) -> None:
    found = as_json("inspect", (session / place).resolve())

    assert [one["iteration"] for one in found["iterations"]] == [100, 9]
    assert [one["owners"] for one in found["iterations"]] == [
        [0, 2] if place == "0" else [0, 1, 2, 3]
    ] * 2
    assert as_json("verify", (session / place).resolve())["whole"] is True


def damage(session: Path) -> None:
    """A tensor, two tensors, a description, an end, and a name that is not the shard's."""
    flip_at(session / "0" / "iter_0000100_0_local_a1.part", 4999)
    flip_at(session / "0" / "iter_0000100_2_local_a1.part", 0, 5000 + 56 + 40 + 24 + 99)
    flip_at(session / "1" / "iter_0000100_1_local_a1.part", NBYTES - 60)
    with (session / "1" / "iter_0000100_3_local_a1.part").open("r+b") as file:
        file.truncate(NBYTES - 1)
    shutil.copy(session / "0" / "iter_0000009_0_local_a1.part",
                session / "0" / "iter_0000010_0_local_a1.part")  # fmt: skip


def test_verify_lists_what_is_damaged_by_file_and_tensor(session: Path) -> None:
    damage(session)
    result = run("verify", session)
    found = as_json("verify", session)

    assert result.exit_code == 1
    assert "is NOT whole: 6 issues in 5 files" in result.stdout
    assert found["whole"] is False
    assert [(one["problem"], one["key"], one["path"][:16]) for one in found["issues"]] == [
        ("damaged", None, "0/iter_0000010_0"),
        ("damaged", "model.w", "0/iter_0000100_0"),
        ("damaged", "model.w", "0/iter_0000100_2"),
        ("damaged", "rng", "0/iter_0000100_2"),
        ("damaged", None, "1/iter_0000100_1"),
        ("damaged", None, "1/iter_0000100_3"),
    ]
    tensor, cut = found["issues"][1], found["issues"][-1]
    assert (tensor["expected"][:7], len(tensor["found"])) == ("digest ", 16)
    assert "expected a local checkpoint, which ends with" in cut["found"]
    assert "0/iter_0000100_0_local_a1.part\n  damaged            model.w: expected digest" in (
        result.stdout
    )


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_file_that_cannot_be_opened_was_not_looked_at(command: str, session: Path) -> None:
    path = session / "1" / "iter_0000100_3_local_a1.part"
    path.unlink()
    path.symlink_to(path)

    result = run(command, session)

    assert result.exit_code == 3
    assert "unreadable" in result.stdout or command == "inspect"


def test_inspect_says_what_headers_show(session: Path) -> None:
    damage(session)
    result = run("inspect", session)
    parts = {part["id"]: part["copies"] for part in as_json("inspect", session)["parts"]}

    assert result.exit_code == 1
    assert "complete    NO, 3 issues; `dist-ckpt verify` lists them all" in result.stdout
    assert [copy["readable"] for copy in parts["iter_0000100_1_local_a1"]] == [False]
    assert [copy["readable"] for copy in parts["iter_0000100_0_local_a1"]] == [True, True]
    assert row_of(result, "iter_0000100_1_local_a1")[1:6] == ["1", "?", "1", "?", "?"]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_stale_files_of_a_killed_save_are_distinguished_from_files_being_written(
    command: str, session: Path
) -> None:
    (session / "0" / f"{PARTIAL_PREFIX}dead").write_bytes(bytes(700))
    writer = ShardDirectory(session).create(described(101, 0), 0)
    result = run(command, session)
    found = as_json(command, session)
    writer.abandon()

    assert result.exit_code == 0
    assert "left over   files that a save did not finish (harmless): 1, 700 B" in result.stdout
    assert "left over   files that are being written: 1" in result.stdout
    kinds = sorted((one["kind"], one["nbytes"]) for one in found["stale_files"])
    assert kinds == [("partial", 700), ("writing", 0)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One checkpoint of the backend."""
    home = tmp_path / "node" / "iter_0000100"
    write_shard(home / xxhash.xxh3_128_hexdigest(COMMON), 100, 0, 0)
    (home / "common.pt").write_bytes(COMMON)
    write_marker(home, "local_replicated")
    return home


@pytest.mark.parametrize(
    ("content", "problems"),
    [(COMMON, []), (b"another", ["damaged"]), (None, ["missing_file"])],
)
def test_the_common_state_of_the_backend_is_compared_too(
    content: bytes | None, problems: Sequence[str], checkpoint: Path
) -> None:
    (checkpoint / "common.pt").unlink()
    if content is not None:
        (checkpoint / "common.pt").write_bytes(content)
    for root in (checkpoint, checkpoint.parent):
        found = as_json("verify", root)
        assert [one["problem"] for one in found["issues"]] == problems
        assert run("verify", root).exit_code == bool(problems)


def test_a_checkpoint_of_the_backend_without_parts_is_not_whole(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / xxhash.xxh3_128_hexdigest(COMMON))
    (finding,) = as_json("verify", checkpoint)["issues"]

    assert finding["problem"] == "missing_file"


def test_shards_that_an_interrupted_overwrite_has_left_are_no_issue(checkpoint: Path) -> None:
    write_shard(checkpoint / xxhash.xxh3_128_hexdigest(b"another"), 100, 0, 0)
    found = as_json("verify", checkpoint)

    assert (found["whole"], found["issues"]) == (True, [])
    assert [one["kind"] for one in found["stale_files"]] == ["partial"]
    assert run("verify", checkpoint).exit_code == 0
