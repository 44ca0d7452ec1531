"""Common state and objects: in Megatron-Core's files, read with an allow-list only."""

import collections
import io
import os
import pickle
import zipfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from signal import Signals
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import safe_globals
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend

import dist_ckpt_strategies
from dist_ckpt_strategies import load_latest
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleVersionError,
    IncompleteCheckpointError,
    StorageError,
    StrategyError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.strategies.common import TorchCommonLoadStrategy, TorchCommonSaveStrategy
from tests.local.clique_worlds import described

STATE: dict[str, Any] = {
    "none": None,
    "numbers": [1, 2.5, 1 << 70, True, 1j],
    "text": ("ü", b"bytes"),
    "ordered": collections.OrderedDict(a=1),
    "tensor": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    "dtype": torch.float32,
    "size": torch.Size((1, 2)),
    "args": Namespace(
        attention_backend=AttnBackend.auto,
        exit_signal=Signals.SIGTERM,
        params_dtype=torch.bfloat16,
        save=Path("run") / "ckpt",
    ),
    "checkpoint_version": 3.0,
    "iteration": 1200,
    "model_type": ModelType.encoder_or_decoder,
    "opt_param_scheduler": {"max_lr": 3e-4, "num_steps": 1200},
    "optimizer_config": OptimizerConfig(lr=1e-4),
    "rng": np.random.default_rng(1).integers(0, 9, 624).astype(np.uint32),
    "scalar": np.float64(2.5),
    "extra": SimpleNamespace(step=torch.tensor(7)),
    "wandb": None,
    "empty": (b"", np.zeros((0, 3))),
}


class Kind(Enum):
    """As it is now; it once had a 2. No list of ours allows it."""

    GPT = 1


class FormerKind:
    """Pickled as the member that is gone."""

    def __reduce__(self) -> Any:
        return Kind, (2,)


@dataclass
class Recipe:
    """No list of ours allows it."""

    steps: int


class RunsACommand:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def load(root: Path, allow: Any = ()) -> Any:
    return TorchCommonLoadStrategy(allow=allow).load_common(root)


def write(root: Path, state: Any, **options: Any) -> Path:
    root.mkdir(exist_ok=True)
    torch.save(state, root / "common.pt", **options)
    return root / "common.pt"


def load_or_error(root: Path, content: bytes) -> Any:
    (root / "common.pt").write_bytes(content)
    try:
        return load(root)
    except CheckpointError as error:
        return error


# Written and read


def test_common_state_comes_back_and_torch_and_this_package_read_each_other(tmp_path: Path) -> None:
    TorchCommonSaveStrategy().save_common(STATE, tmp_path / "ours")
    write(tmp_path / "torchs", STATE)

    for name in ("ours", "torchs"):
        assert described(load(tmp_path / name)) == described(STATE)
        assert [path.name for path in (tmp_path / name).iterdir()] == ["common.pt"]
    theirs = torch.load(tmp_path / "ours" / "common.pt", weights_only=False)
    assert described(theirs) == described(STATE)


def test_saving_common_state_makes_an_older_checkpoint_incomplete(tmp_path: Path) -> None:
    place = tmp_path / "iter_0000001"
    place.mkdir()
    (place / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    TorchCommonSaveStrategy().save_common({}, place)

    with pytest.raises(CheckpointNotFoundError):
        load_latest(None, [tmp_path])
    with pytest.raises(IncompleteCheckpointError, match=r"is missing; common\.pt is there"):
        dist_ckpt_strategies.open(place)


@pytest.mark.parametrize(
    ("obj", "allow"),
    [
        (Recipe(3), Recipe),
        (Kind.GPT, Kind),
        (Fraction(1, 3), Fraction),
    ],
)
def test_a_class_is_written_and_read_only_where_it_is_allowed(
    obj: object, allow: type, tmp_path: Path
) -> None:
    state = {"deep": [obj]}
    with pytest.raises(UnsafeObjectError, match=rf"needs \S*{allow.__name__}, .*allow="):
        TorchCommonSaveStrategy().save_common(state, tmp_path)
    assert not (tmp_path / "common.pt").exists()
    TorchCommonSaveStrategy(allow=[allow]).save_common(state, tmp_path)

    for _ in range(2):  # the permission holds for one call only
        with pytest.raises(UnsafeObjectError, match=rf"{allow.__name__}.*allow=") as caught:
            load(tmp_path)
        assert caught.value.path == str(tmp_path / "common.pt")
        assert load(tmp_path, [allow]) == state


def test_whatever_is_in_the_list_of_megatron_core_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = [*safe_globals.SAFE_GLOBALS, torch._C.Generator, Fraction]
    monkeypatch.setattr(safe_globals, "SAFE_GLOBALS", later)

    TorchCommonSaveStrategy().save_common(
        {"rng": torch.Generator().manual_seed(3), "part": Fraction(1, 3)}, tmp_path
    )

    found = load(tmp_path)
    assert found["rng"].initial_seed() == 3
    assert found["part"] == Fraction(1, 3)


def test_a_class_that_the_file_does_not_name_is_no_damage_and_can_be_allowed(
    tmp_path: Path,
) -> None:
    parts = [np.arange(1).__reduce__()[0], np.ndarray, np.dtype]
    write(tmp_path, {"a": np.array([None, "a"], dtype=object)})

    with pytest.raises(UnsafeObjectError, match=r"needs numpy\.dtypes\.ObjectDType, .*allow="):
        load(tmp_path, parts)
    assert load(tmp_path, [*parts, np.dtypes.ObjectDType])["a"].tolist() == [None, "a"]


@pytest.mark.parametrize("wrong", ["os.system", 5, (Fraction,), (Fraction, 5), ["list"], None])
def test_only_classes_can_be_allowed(wrong: Any, tmp_path: Path) -> None:
    write(tmp_path, {})
    with pytest.raises(StrategyError, match="allow: expected classes"):
        load(tmp_path, [wrong])


def test_objects_are_saved_found_and_loaded_under_present_and_older_names(tmp_path: Path) -> None:
    key, grid = "layer/0/extra", [(row, column) for row in range(2) for column in range(3)]
    objects = {at: ShardedObject(key, {"at": at}, (2, 3), at) for at in grid}
    replica = ShardedObject(key, {"at": None}, (2, 3), (0, 0), replica_id=1)
    saver, loader = TorchCommonSaveStrategy(), TorchCommonLoadStrategy()
    assert saver.can_handle_sharded_objects is loader.can_handle_sharded_objects is True
    saver.save_sharded_objects({**objects, "replica": [replica]}, tmp_path)
    torch.save({}, tmp_path / "layer" / "notes.pt")
    (tmp_path / "loop").symlink_to(tmp_path)

    for _ in range(2):
        found = loader.load_sharded_metadata(tmp_path)
        assert set(found) == {one.unique_key for one in objects.values()}
        wanted = {at: ShardedObject(key, None, (2, 3), at) for at in grid}
        assert loader.load_sharded_objects(wanted, tmp_path) == {at: {"at": at} for at in grid}
        for path in (tmp_path / key).iterdir():  # as early releases named them
            path.rename(path.with_name(path.name.replace("_2.3.pt", "_2.pt")))


# Not trusted


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older form"])
def test_a_call_of_a_command_is_refused_by_name_and_never_made(
    zipped: bool, tmp_path: Path
) -> None:
    trace = tmp_path / "it ran"
    state = {"x": RunsACommand(f"touch '{trace}'")}
    path = write(tmp_path, state, _use_new_zipfile_serialization=zipped)

    with pytest.raises(UnsafeObjectError) as caught:
        load(tmp_path)
    for said in ("posix.system", "allow=", str(path)):
        assert said in str(caught.value)
    assert not trace.exists()


class AsksForMore:
    """Has a pickle get what is no member of an enum."""

    def __reduce__(self) -> Any:
        return getattr, (Namespace, "mro")


def test_only_members_of_enums_are_got_by_a_pickle(tmp_path: Path) -> None:
    write(tmp_path, {"x": AsksForMore()})

    with pytest.raises(UnsafeObjectError, match=r"needs builtins\.getattr,"):
        load(tmp_path)


def test_tensors_that_were_on_a_gpu_land_on_the_cpu(tmp_path: Path) -> None:
    path = write(tmp_path, {"t": torch.arange(6.0)})
    here, there = b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:5"
    changed = io.BytesIO()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(changed, "w") as target:
        for entry in source.infolist():
            target.writestr(entry, source.read(entry).replace(here, there))
    path.write_bytes(changed.getvalue())

    assert load(tmp_path)["t"].device.type == "cpu"
    assert torch.equal(load(tmp_path)["t"], torch.arange(6.0))


def test_a_member_that_an_enum_has_lost_is_named_with_the_remedy(tmp_path: Path) -> None:
    write(tmp_path, {"args": FormerKind()})

    with pytest.raises(IncompatibleVersionError, match=r"Kind with the value 2.*Kind\._missing_"):
        load(tmp_path, [Kind])


# Damaged


def test_a_missing_common_state_is_incomplete(tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpointError, match=r"common\.pt"):
        load(tmp_path)


@pytest.mark.slow
def test_no_flipped_byte_changes_what_is_loaded(tmp_path: Path) -> None:
    """At any of its places: an error that says so, or (in names and padding) the same object."""
    small = {key: STATE[key] for key in ("numbers", "text", "ordered", "tensor", "dtype", "size")}
    expected = described(small)
    TorchCommonSaveStrategy().save_common(small, tmp_path)
    whole = (tmp_path / "common.pt").read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF if position % 2 else 0x20
        found = load_or_error(tmp_path, bytes(damaged))
        if isinstance(found, CheckpointError):
            assert isinstance(found, CorruptCheckpointError), (position, found)
            assert "damaged" in str(found), (position, found)
        else:
            assert described(found) == expected, position
    for size in range(0, len(whole), 7):
        found = load_or_error(tmp_path, whole[:size])
        assert isinstance(found, CorruptCheckpointError), (size, found)
    # Torch takes a record marked as a directory for empty, and returns uninitialised memory.
    marked = bytearray(whole)
    marked[marked.index(b"PK\1\2") + 38] ^= 1 << 4
    assert "is not torch's" in str(load_or_error(tmp_path, bytes(marked)))


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"P", b"PK", b"PK\x03\x04", b"\x80", b"\x80\x02", b"hello", b"\0" * 1000),
        *(pickle.dumps({"c": 1}), b"\x80\x02" + b"(" * 100_000, b"\x80\x02]q\0(h\0l."),
    ],
)
def test_files_that_torch_did_not_save_are_damaged_without_advice_to_unpickle_them_freely(
    content: bytes, tmp_path: Path
) -> None:
    found = load_or_error(tmp_path, content)

    assert isinstance(found, CorruptCheckpointError)
    assert found.path == str(tmp_path / "common.pt")
    assert "weights_only" not in str(found)


@pytest.mark.parametrize("more", [1, 64, 4096])
def test_zeros_after_a_file_as_a_crash_leaves_them_are_damage(more: int, tmp_path: Path) -> None:
    content = write(tmp_path, {"a": 1}).read_bytes()

    assert load_or_error(tmp_path, content) == {"a": 1}
    found = load_or_error(tmp_path, content + bytes(more))
    assert isinstance(found, CorruptCheckpointError)


@pytest.mark.parametrize("content", [[1], 5, None, torch.ones(2)], ids=str)
def test_common_state_that_is_no_dict_is_damaged(content: Any, tmp_path: Path) -> None:
    write(tmp_path, content)

    with pytest.raises(CorruptCheckpointError, match="expected a dict"):
        load(tmp_path)


# Plain objects are kept as JSON in packs


def test_objects_that_json_cannot_hold_are_pickled_or_refused_with_their_key(
    tmp_path: Path,
) -> None:
    state: dict[str, Any] = {"deep": {}}
    state["deep"]["itself"] = state["deep"]
    for backend in (("zarr", 1), ("safetensors", 1)):
        place = tmp_path / backend[0]
        saved = {"o": ShardedObject("rng", state, (1,), (0,))}
        dist_ckpt_strategies.save(saved, place, backend)
        wanted = {"o": ShardedObject("rng", None, (1,), (0,))}
        loaded: Any = dist_ckpt_strategies.load(wanted, place)
        assert loaded["o"]["deep"]["itself"] is loaded["o"]["deep"]
        huge = {"o": ShardedObject("rng", [10**4300], (1,), (0,))}
        with pytest.raises(StorageError, match=r"rng/shard_0_1 cannot be saved"):
            dist_ckpt_strategies.save(huge, tmp_path / "huge", backend)
