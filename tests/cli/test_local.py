"""``dist-ckpt inspect`` and ``verify`` of local checkpoints: saves, shards, damage."""

import fcntl
import shutil
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from typer.testing import Result

import dist_ckpt_strategies
from dist_ckpt_strategies import LocalOptions
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
    LocalCheckpointManager,
)
from tests.cli.commands import issues_of, json_of, run
from tests.support.checkpoints import copied, flip_at, flip_bit
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

RNG = torch.full((100,), 77, dtype=torch.uint8)
BOTH_COMMANDS = pytest.mark.parametrize("command", ["inspect", "verify"])


def save_all(rank: int, root: Path) -> None:
    """Two saves of a session, and a checkpoint of the backend."""
    cliques = CliqueReplicationStrategy.from_replication_params(2, 2)
    manager = LocalCheckpointManager(root / "local", "run-7", repl_strategy=cliques, keep=2)
    weight = torch.zeros(2_500_000, dtype=torch.uint8)  # more than is read at a time
    for iteration in (9, 100):
        state = {"model": {"w": weight, "b": torch.ones(2, 5)}, "rng": RNG}
        manager.save(BasicTensorAwareStateDict(state), iteration)
    dist_ckpt_strategies.register(local=LocalOptions(replication_jump=2))
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, rank, 4))
    place = root / "node" / "iter_0000100"
    dist_ckpt_strategies.save({"w": shard, "iteration": 100}, place, ("local_replicated", 1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``save_all`` wrote; of the session, shards and copies of ranks 0 and 1 only."""
    root = tmp_path_factory.mktemp("saved")
    assert run_processes(4, save_all, root) == [None] * 4
    session = root / "local" / "run-7"
    for rank in ("2", "3"):
        shutil.rmtree(session / rank)
    shutil.copy(file_of(session, 0, 100, 0), session / "1")
    return root


@pytest.fixture
def session(saved: Path, tmp_path: Path) -> Path:
    """A session to be damaged."""
    return copied(saved / "local", tmp_path / "local") / "run-7"


def file_of(session: Path, holder: int, iteration: int, owner: int) -> Path:
    (path,) = (session / str(holder)).glob(f"iter_{iteration:07d}_{owner}_*")
    return path


def row_of(result: Result, name: str) -> list[str]:
    (line,) = (line for line in result.stdout.splitlines() if line.startswith(name))
    return line.split()


def test_saves_and_shards_are_listed(session: Path) -> None:
    result = run("inspect", session)

    assert result.exit_code == 0
    file = file_of(session, 0, 100, 0)
    save = row_of(result, "100 ")
    assert save[1:6] == ["4", "of", "4", "5", "run-7"]
    assert save[7:] == ["MB", file.stem.rpartition("_")[2]]
    first = row_of(result, file.stem)
    size = f"{2 * file.stat().st_size / 1e6:.2f}"  # of both copies
    assert first[1:] == ["0", "4", "0,", "1", "basic", "3", size, "MB"]
    assert "local       2 saves, 8 shards in 9 files" in result.stdout


@pytest.mark.parametrize("place", [".", "..", "0"])
def test_a_root_a_session_and_a_ranks_directory_will_do(place: str, session: Path) -> None:
    found = json_of("inspect", (session / place).resolve())

    assert [one["iteration"] for one in found["iterations"]] == [100, 9]
    owners = [0, 2] if place == "0" else [0, 1, 2, 3]
    assert [one["owners"] for one in found["iterations"]] == [owners] * 2
    assert json_of("verify", (session / place).resolve())["whole"] is True


def test_a_file_and_the_directories_of_a_whole_clique_will_do(session: Path) -> None:
    file = file_of(session, 0, 100, 2)
    other = copied(session.parent, session.parents[1] / "clique" / "b") / session.name
    here = copied(session.parent, session.parents[1] / "clique" / "a") / session.name
    shutil.rmtree(other / "0")
    flip_at(file_of(here, 0, 100, 2), 2_000_000)

    assert [one["owners"] for one in json_of("inspect", file)["iterations"]] == [[2]]
    assert json_of("verify", file)["whole"] is True
    found = json_of("inspect", here.parents[1])
    assert [(one["owners"], one["num_copies"]) for one in found["iterations"]] == [
        ([0, 1, 2, 3], 8),  # of ranks 0 and 1 one more, see above
        ([0, 1, 2, 3], 6),
    ]
    problem, key, path = issues_of(here.parents[1])[0]
    assert (problem, key, path) == ("damaged", "model.w", f"a/run-7/0/{file.name}")
    flip_at(file, 60)
    assert run("verify", file).exit_code == run("inspect", file).exit_code == 1


def test_verify_lists_what_is_damaged_by_file_and_tensor_and_inspect_what_headers_show(
    session: Path,
) -> None:
    # A tensor, two tensors, a header, an end, and a name that is not the shard's.
    flip_at(file_of(session, 0, 100, 0), 2_499_999)
    several = file_of(session, 0, 100, 2)
    flip_at(several, 1_000_000)
    flip_bit(several, RNG.numpy().tobytes())
    flip_at(file_of(session, 1, 100, 1), 60)
    short = file_of(session, 1, 100, 3)
    short.write_bytes(short.read_bytes()[:-1])
    misnamed = file_of(session, 0, 9, 0)
    shutil.copy(misnamed, misnamed.with_name(misnamed.name.replace("0000009", "0000010")))
    result = run("verify", session)
    found = json_of("verify", session)

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
    assert "written by rank 0: bytes 2363432 to 2504136" in tensor["expected"]
    assert "is damaged: expected" in cut["found"]
    assert f"{tensor['path']}\n  damaged            model.w: expected" in result.stdout

    result = run("inspect", session)
    parts = {part["id"]: part["copies"] for part in json_of("inspect", session)["parts"]}
    whole, damaged = (file_of(session, owner, 100, owner).stem for owner in (0, 1))
    assert result.exit_code == 1
    assert "complete    NO, 3 issues; `dist-ckpt verify` lists them all" in result.stdout
    assert [copy["readable"] for copy in parts[damaged]] == [False]
    assert [copy["readable"] for copy in parts[whole]] == [True, True]
    assert row_of(result, damaged)[1:6] == ["1", "?", "1", "?", "?"]


@BOTH_COMMANDS
def test_a_file_that_cannot_be_opened_was_not_looked_at(command: str, session: Path) -> None:
    path = file_of(session, 1, 100, 3)
    path.unlink()
    path.symlink_to(path)

    result = run(command, session)

    assert result.exit_code == 3
    assert "unreadable" in result.stdout or command == "inspect"


@BOTH_COMMANDS
def test_stale_files_of_a_killed_save_are_distinguished_from_files_being_written(
    command: str, session: Path
) -> None:
    for name, nbytes in (("dead", 700), ("alive", 0)):
        (session / "0" / f".partial-{name}").write_bytes(bytes(nbytes))
    with (session / "0" / ".partial-alive").open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        result = run(command, session)
        found = json_of(command, session)

    assert result.exit_code == 0
    assert "left over   files that a save did not finish (harmless): 1, 700 B" in result.stdout
    assert "left over   files that are being written: 1" in result.stdout
    kinds = sorted((one["kind"], one["nbytes"]) for one in found["stale_files"])
    assert kinds == [("partial", 700), ("writing", 0)]


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """One checkpoint of the backend, to be damaged."""
    return copied(saved / "node", tmp_path / "node") / "iter_0000100"


def test_the_common_state_and_the_parts_of_the_backend_are_verified_too(checkpoint: Path) -> None:
    (parts,) = (path for path in checkpoint.iterdir() if path.is_dir())
    common = checkpoint / "common.pt"
    content = common.read_bytes()

    def require(*problems: str) -> None:
        for root in (checkpoint, checkpoint.parent):
            assert [problem for problem, _, _ in issues_of(root)] == [*problems]
            assert run("verify", root).exit_code == bool(problems)

    require()
    common.write_bytes(b"another")
    require("damaged")
    common.unlink()
    require("missing_file")
    common.write_bytes(content)
    others = copied(parts, parts.with_name("0" * 32))  # of an overwrite that was interrupted
    require()
    assert {one["kind"] for one in json_of("verify", checkpoint)["stale_files"]} == {"partial"}
    for path in (parts, others):
        shutil.rmtree(path)
    assert [problem for problem, _, _ in issues_of(checkpoint)] == ["missing_file"]
