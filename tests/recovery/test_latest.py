"""The newest checkpoint that is whole, local or global, and a report of those passed over."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import (
    CheckpointNotFoundError,
    NoUsableCheckpointError,
    StorageError,
    StrategyError,
)
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    LazyCliqueReplicationStrategy,
    LocalCheckpointManager,
)
from dist_ckpt_strategies.recovery import Loaded, Tier, load_latest
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

NUM_RANKS = 2


class Run:
    """A training that saves locally and globally, as one rank sees it."""

    def __init__(self, root: str) -> None:
        self.rank = dist.get_rank()
        self.global_root = Path(root) / "global"
        self.node = Path(root) / f"node{self.rank}"
        self.manager = LocalCheckpointManager(
            self.node,
            repl_strategy=LazyCliqueReplicationStrategy(1, 2, timeout_s=30),
            keep=2,
            timeout_s=30,
        )

    def save_locally(self, iteration: int) -> None:
        state = BasicTensorAwareStateDict({"w": torch.full((4,), float(iteration))})
        self.manager.save(state, iteration)

    def save_globally(self, iteration: int) -> None:
        dist_ckpt_strategies.save(self._state(float(iteration)), self.directory(iteration))

    def directory(self, iteration: int) -> Path:
        return self.global_root / f"iter_{iteration:07d}"

    def load(self) -> Loaded:
        return load_latest(
            self.manager,
            [self.global_root],
            lambda path: dist_ckpt_strategies.load(self._state(-1.0), path),
        )

    def require(self, tier: Tier, iteration: int) -> Loaded:
        found = self.load()
        assert (found.tier, found.iteration) == (tier, iteration), found
        state = found.state.state_dict if tier is Tier.LOCAL else found.state
        assert state["w"].tolist() == [float(iteration)] * len(state["w"])
        return found

    def damage_local(self, iteration: int) -> None:
        """Both copies of rank 1's part."""
        for path in self.node.rglob(f"iter_{iteration:07d}_1_*"):
            content = bytearray(path.read_bytes())
            content[0] ^= 1
            path.write_bytes(content)
        dist.barrier()

    def _state(self, value: float) -> dict[str, Any]:
        data = torch.full((2,), value)
        return {"w": ShardedTensor.from_rank_offsets("w", data, (0, self.rank, NUM_RANKS))}


def falls_back(rank: int, root: str) -> list[str]:
    """One checkpoint after the other becomes unusable."""
    run = Run(root)
    run.save_locally(90)
    run.save_globally(80)
    run.save_globally(95)
    run.save_locally(100)
    assert run.require(Tier.LOCAL, 100).attempts == ()
    run.damage_local(100)
    (refused,) = run.require(Tier.GLOBAL, 95).attempts
    assert (refused.tier, refused.iteration) == (Tier.LOCAL, 100)
    dist.barrier()
    if rank == 0:
        (run.directory(95) / "arrays" / "w" / "c.1").unlink()
    dist.barrier()
    reasons = [str(one) for one in run.require(Tier.LOCAL, 90).attempts]
    run.damage_local(90)
    assert run.require(Tier.GLOBAL, 80).iteration == 80
    dist.barrier()
    if rank == 0:
        (run.directory(80) / "metadata.json").unlink()
    dist.barrier()
    with pytest.raises(NoUsableCheckpointError) as caught:
        run.load()
    return [*reasons, str(caught.value)]


def names_what_is_whole(rank: int, root: str) -> list[tuple[str, int, str, Any, int]]:
    """The same with the two arguments that there must be."""
    run = Run(root)
    run.save_locally(60)
    for iteration in (50, 70, 80):
        run.save_globally(iteration)
    seen = []
    for name in ("no damage", "c.1", "metadata.json"):
        dist.barrier()
        if rank == 0 and name != "no damage":
            number = 80 if name == "c.1" else 70
            next(run.directory(number).rglob(name)).unlink()
        dist.barrier()
        found = load_latest(run.manager, [run.global_root])
        is_local = found.tier is Tier.LOCAL
        state = found.state.state_dict["w"].tolist() if is_local else found.state
        where = "" if is_local else Path(found.name).name
        seen.append((found.tier.value, found.iteration, where, state, len(found.attempts)))
    return seen


def fails_on_one_rank(rank: int, root: str, kind: type[Exception]) -> str:
    run = Run(root)
    run.save_globally(5)

    def load(path: Path) -> None:
        if rank == 1:
            raise kind(f"{path}: a disk of this rank alone")

    with pytest.raises(NoUsableCheckpointError) as caught:
        load_latest(None, [run.directory(5)], load)
    assert not isinstance(caught.value, FileNotFoundError)
    return str(caught.value)


def cannot_read_a_marker(rank: int, root: str) -> str:
    run = Run(root)
    run.save_globally(5)

    def fail(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).endswith("iter_0000005/metadata.json"):
            raise OSError(errno.EIO, "a disk of this rank alone")

    if rank == 1:
        sys.addaudithook(fail)
    with pytest.raises(NoUsableCheckpointError) as caught:
        run.load()
    return str(caught.value)


NOT_FOUND, UNUSABLE = CheckpointNotFoundError, NoUsableCheckpointError


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("nowhere", None, NOT_FOUND, "no checkpoint to load in .*nowhere"),
        ("iter_0000010/manifest/x", b"", NOT_FOUND, "iter_0000010 is not a distributed"),
        ("iter_0000010/.partial-0a7/manifest/x", b"", NOT_FOUND, "iter_0000010 is not"),
        ("iter_0000010/.removed-0a9/manifest/x", b"", NOT_FOUND, "iter_0000010 is not"),
        ("iter_0000010/metadata.json", b"{", UNUSABLE, "iter_0000010"),
    ],
)
def test_what_is_no_checkpoint_is_refused_and_what_was_one_is_named(
    name: str, content: bytes | None, error: type[Exception], words: str, tmp_path: Path
) -> None:
    root, path = tmp_path, tmp_path / name
    if content is None:
        root = path
    else:
        path.parent.mkdir(parents=True)
        path.write_bytes(content)

    for place in {root, root / name.partition("/")[0]}:
        with pytest.raises(error, match=words) as raised:
            load_latest(None, [place], lambda path: path)
        assert ".partial" not in str(raised.value)
        assert ".removed" not in str(raised.value)


def test_a_path_that_a_url_was_made_into_is_refused() -> None:
    with pytest.raises(StrategyError, match="takes slashes out of a URL"):
        load_latest(None, [Path("s3://bucket/run")], lambda path: path)


def test_a_directory_that_cannot_be_looked_at_is_an_error_of_ours(tmp_path: Path) -> None:
    nowhere = tmp_path / ("x" * 300)

    with pytest.raises(StorageError, match="too long for the file system") as caught:
        load_latest(None, [nowhere], lambda path: path)

    assert caught.value.path == str(nowhere)


def lose_local_saves(_rank: int, root: str) -> list[str]:
    """What is said of the newest save, damaged in both copies; then of two that lack a part."""
    run = Run(root)
    run.save_locally(10)
    run.save_locally(20)
    dist.barrier()
    for path in run.node.rglob("iter_0000020_*.part"):
        content = bytearray(path.read_bytes())
        content[0] ^= 4
        path.write_bytes(content)
    dist.barrier()
    found = load_latest(run.manager, [])
    said = [f"{found.tier} {found.iteration}", *map(str, found.attempts)]
    dist.barrier()
    for path in run.node.rglob("iter_*_1_local_*.part"):
        path.unlink()
    dist.barrier()
    with pytest.raises(CheckpointNotFoundError) as caught:
        load_latest(run.manager, [])
    return [*said, str(caught.value)]


def look_for_the_newest(rank: int, root: str) -> dict[str, Any]:
    """Body of a rank."""
    return {
        "back": falls_back(rank, f"{root}/back"),
        "named": names_what_is_whole(rank, f"{root}/named"),
        "one rank": [
            fails_on_one_rank(rank, f"{root}/{kind.__name__}", kind)
            for kind in (StorageError, ValueError)
        ],
        "local": lose_local_saves(rank, f"{root}/local"),
        "marker": cannot_read_a_marker(rank, f"{root}/marker"),
    }


def test_each_checkpoint_that_cannot_be_used_gives_way_to_the_next_on_all_ranks(
    tmp_path: Path,
) -> None:
    for found in run_processes(NUM_RANKS, look_for_the_newest, str(tmp_path)):
        local, global_, nothing = found["back"]
        assert "local checkpoint of iteration 100" in local
        assert "digest" in local
        assert "global checkpoint of iteration 95" in global_
        assert "missing" in global_
        assert nothing.count("checkpoint of iteration") >= 4
        assert "iter_0000080 is not a distributed checkpoint, or is incomplete" in nothing
        assert found["named"] == [
            ("global", 80, "iter_0000080", None, 0),
            ("global", 70, "iter_0000070", None, 1),
            ("local", 60, "", [60.0] * 4, 2),
        ]
        for message in found["one rank"]:
            assert "rank 1: " in message
            assert "a disk of this rank alone" in message
        newest, damaged, lost = found["local"]
        assert newest == "local 10"
        assert "iteration 20" in damaged
        assert "damaged in every copy; iteration 10 is used instead" in damaged
        assert "iteration 20: no rank has the shards of ranks 1" in lost
        assert "iter_0000005): rank 1: " in found["marker"]
        assert "a disk of this rank alone" in found["marker"]
