"""The newest checkpoint that is whole, local or global, and a report of those passed over."""

import errno
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.comm import base
from dist_ckpt_strategies.errors import CheckpointNotFoundError, StorageError, StrategyError
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    LazyCliqueReplicationStrategy,
    LocalCheckpointManager,
)
from dist_ckpt_strategies.manager.latest import Loaded, Tier, load_latest
from tests.local.clique_worlds import once
from tests.support.checkpoints import flip_at
from tests.support.entries import PACKS, logged, require_on_ranks
from tests.support.system_calls import before_calls

pytestmark = pytest.mark.multiprocess

NUM_RANKS = 2
MARKER = "metadata.json"


class Run:
    def __init__(self, root: str, backend: tuple[str, int] = ("safetensors", 1)) -> None:
        self.backend = backend
        """Format of the global checkpoints."""
        is_packs = backend == PACKS
        self.marker, self.data = ("index", "*.safetensors") if is_packs else (MARKER, "1")
        """What makes one count, and what holds data of it."""
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
        state = self._state(float(iteration))
        dist_ckpt_strategies.save(state, self.directory(iteration), self.backend)

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
        """The tensor in both copies of rank 1's shard."""
        self._each(
            f"node*/**/iter_{iteration:07d}_1_*", lambda path: flip_at(path, 4096)
        )  # a tensor

    def lose(self, pattern: str) -> None:
        """Files of the nodes, or of a global checkpoint."""
        self._each(pattern, Path.unlink)

    def lose_global(self, iteration: int, name: str) -> None:
        self.lose(f"global/{self.directory(iteration).name}/**/{name}")

    def _each(self, pattern: str, act: Callable[[Path], Any]) -> None:
        """Collective."""
        once(self.rank, lambda: list(map(act, self.global_root.parent.glob(pattern))))

    def _state(self, value: float) -> dict[str, Any]:
        data = torch.full((2,), value)
        return {"w": ShardedTensor.from_rank_offsets("w", data, (0, self.rank, NUM_RANKS))}


def falls_back(_rank: int, root: str, backend: tuple[str, int]) -> None:
    """One checkpoint after the other becomes unusable."""
    run = Run(root, backend)
    run.save_locally(90)
    run.save_globally(80)
    run.save_globally(95)
    run.save_locally(100)
    assert run.require(Tier.LOCAL, 100).attempts == ()
    run.damage_local(100)
    (refused,) = run.require(Tier.GLOBAL, 95).attempts
    assert (refused.tier, refused.iteration) == (Tier.LOCAL, 100)
    run.lose_global(95, run.data)
    local, global_ = map(str, run.require(Tier.LOCAL, 90).attempts)
    assert "local checkpoint of iteration 100" in local
    assert "digest" in local
    assert "global checkpoint of iteration 95" in global_
    assert "missing" in global_ or "does not exist" in global_
    run.damage_local(90)
    run.require(Tier.GLOBAL, 80)
    run.lose_global(80, run.marker)
    run.lose_global(80, MARKER)
    with pytest.raises(StorageError, match=" can be loaded") as caught:
        run.load()
    assert not isinstance(caught.value, CheckpointNotFoundError)
    text = str(caught.value)
    assert text.count("checkpoint of iteration") >= 4
    assert "iter_0000080 is not a distributed checkpoint, or is incomplete" in text


def names_what_is_whole(_rank: int, root: str, backend: tuple[str, int]) -> None:
    """Without a function that loads."""
    run = Run(root, backend)
    run.save_locally(60)
    run.save_globally(70)
    run.save_globally(80)
    for number, (iteration, lost) in enumerate([(80, run.data), (70, run.marker)]):
        found = load_latest(run.manager, [run.global_root])
        expected = (Tier.GLOBAL, iteration, number)
        assert (found.tier, found.iteration, len(found.attempts)) == expected
        assert (Path(found.name), found.state) == (run.directory(iteration), None)
        run.lose_global(iteration, lost)
    assert len(run.require(Tier.LOCAL, 60).attempts) == 2


def one_rank_has_a_bad_disk(rank: int, root: str, backend: tuple[str, int]) -> None:
    """Its function that loads raises, or it cannot read a marker; each rank logs what it tried."""
    run = Run(root, backend)
    run.save_globally(5)
    texts = logged(level=logging.WARNING)
    vars(base)["_LOG_AFTER_S"] = 60.0
    for kind in (StorageError, ValueError):

        def load(path: Path, kind: type[Exception] = kind) -> None:
            if rank == 1:
                raise kind(f"{path}: a disk of this rank alone")

        with pytest.raises(StorageError, match=r"rank 1: .*rank alone") as caught:
            load_latest(None, [run.directory(5)], load)
        assert not isinstance(caught.value, FileNotFoundError)

    def fail(_name: str, path: str) -> None:
        if rank == 1 and path.endswith(f"iter_0000005/{run.marker}"):
            raise OSError(errno.EIO, "a disk of this rank alone")

    words = r"iter_0000005\): rank 1: .*a disk of this rank alone"
    with before_calls(fail, ["open"]), pytest.raises(StorageError, match=words):
        run.load()
    assert [line.partition(" checkpoint of iteration 5 ")[0] for line in texts] == ["global"] * 3


def lose_local_saves(_rank: int, root: str, backend: tuple[str, int]) -> None:
    """A first save is killed; then the newest is damaged in both copies; then both lack a part."""
    run = Run(root, backend)
    run.save_locally(5)
    run.lose("node*/**/iter_*_1_local_*.safetensors")
    run.lose("node*/**/finished")
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint to load in"):
        load_latest(run.manager, [])
    run.save_locally(10)
    run.save_locally(20)
    run.damage_local(20)
    found = load_latest(run.manager, [])
    assert (found.tier, found.iteration) == (Tier.LOCAL, 10)
    (damaged,) = map(str, found.attempts)
    assert "iteration 20" in damaged
    assert re.search(r"iter_0000020_1_local_\w+\.safetensors.* have digest", damaged)
    run.lose("node*/**/iter_0000020_1_local_*.safetensors")
    (lost,) = map(str, run.require(Tier.LOCAL, 10).attempts)
    assert "iteration 20: no rank has the shards of ranks 1" in lost
    run.lose("node*/**/iter_*_1_local_*.safetensors")
    words = "can be loaded.*iteration 20: no rank has the shards of ranks 1"
    with pytest.raises(StorageError, match=words):
        load_latest(run.manager, [])
    run.save_globally(5)
    assert [one.iteration for one in run.require(Tier.GLOBAL, 5).attempts] == [20, 10]


def look_for_the_newest(rank: int, root: str, backend: tuple[str, int]) -> None:
    for act in (falls_back, names_what_is_whole, one_rank_has_a_bad_disk, lose_local_saves):
        act(rank, f"{root}/{act.__name__}", backend)


@pytest.mark.parametrize("backend", [("zarr", 1), PACKS], ids=str)
def test_each_checkpoint_that_cannot_be_used_gives_way_to_the_next_on_all_ranks(
    backend: tuple[str, int], tmp_path: Path
) -> None:
    require_on_ranks(NUM_RANKS, look_for_the_newest, str(tmp_path), backend)


NOT_FOUND, UNUSABLE = CheckpointNotFoundError, "no checkpoint in .* can be loaded.*"


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("nowhere/metadata.json", None, NOT_FOUND, "no checkpoint to load in .*nowhere"),
        ("iter_0000010/manifest/x", b"", NOT_FOUND, "iter_0000010 is not a distributed"),
        ("iter_0000010/.partial-0a7/manifest/x", b"", NOT_FOUND, "iter_0000010 is not"),
        ("iter_0000010/.removed-0a9/manifest/x", b"", NOT_FOUND, "iter_0000010 is not"),
        ("iter_0000010/metadata.json", b"{", StorageError, f"{UNUSABLE}iter_0000010"),
        ("epoch=3-step=12.ckpt/metadata.json", b"{", StorageError, f"{UNUSABLE}iteration 12"),
        ("s3:/bucket/run", None, StrategyError, "takes slashes out of a URL"),
        ("x" * 300, None, StorageError, "x: .*too long for the file system"),
    ],
)
def test_other_files_are_refused_and_incomplete_checkpoints_are_named(
    name: str,
    content: bytes | None,
    error: type[Exception],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path, top = Path(name), Path(name.partition("/")[0])
    places = [path if error is StrategyError else top]
    if content is not None:
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        places.append(tmp_path)

    for place in places:
        with pytest.raises(error, match=words) as raised:
            load_latest(None, [place], lambda path: path)
        assert isinstance(raised.value, CheckpointNotFoundError) == (error is NOT_FOUND)
        if content is None and error is StorageError:
            assert isinstance(raised.value, StorageError)
            assert raised.value.path == str(place.absolute())
        assert ".partial" not in str(raised.value)
        assert ".removed" not in str(raised.value)
