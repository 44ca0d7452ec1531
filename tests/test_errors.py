"""Errors name what is at fault, and stay the same on their way between ranks and processes."""

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing.core import CheckpointingException

import dist_ckpt_strategies
from dist_ckpt_strategies import errors
from dist_ckpt_strategies.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    PeerError,
    StorageError,
    as_checkpoint_error,
    error_from_peer,
    kind_of,
)
from dist_ckpt_strategies.megatron.types import as_megatron_error

EVERY_ERROR = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, CheckpointError)
]


def made(kind: type[CheckpointError]) -> CheckpointError:
    details = {"key": "layer.w", "path": "/ckpt/layer.w/0.0"}
    if issubclass(kind, PeerError):
        return kind(3, "layer.w: broken", **details)
    return kind("layer.w: broken", **details)


def values(error: CheckpointError) -> tuple[Any, ...]:
    rank = error.rank if isinstance(error, PeerError) else None
    return (error.key, error.path, error.global_rank, error.message, str(error), error.args, rank)


@pytest.mark.parametrize("kind", EVERY_ERROR, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling_copying_translation_and_the_way_to_a_peer(
    kind: type[CheckpointError],
) -> None:
    peer = error_from_peer(2, kind.__name__, "w: broken", key="w", path="/w")
    for error in (made(kind).at_rank(5), peer, error_from_peer(2, kind_of(peer), "broken")):
        error.add_note("seen while saving")
        translated = as_megatron_error(error)
        assert isinstance(translated, CheckpointingException)
        assert as_megatron_error(translated) is translated
        for one in (error, translated):
            copies = (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one))
            for other in (translated, *copies):
                assert isinstance(other, kind)
                assert isinstance(other, PeerError) == isinstance(error, PeerError)
                assert type(other).__name__ == type(error).__name__
                assert values(other) == values(error)
            for other in copies:
                assert isinstance(other, CheckpointingException) == (one is translated)
            assert kind_of(one) == kind_of(error)
            assert all(other.__notes__[-1] == "seen while saving" for other in copies)


@pytest.mark.parametrize("kind", ["", "OSError", "SomethingNewError", "__class__"])
def test_a_class_that_this_package_does_not_know_becomes_a_peer_error(kind: str) -> None:
    error = error_from_peer(2, kind, "broken")

    assert type(error) is PeerError
    assert str(error) == "rank 2: broken"


def test_an_os_error_of_a_file_is_a_storage_error_that_names_it() -> None:
    error = as_checkpoint_error(FileNotFoundError(2, "No such file or directory", "/ckpt/w"))

    assert isinstance(error, StorageError)
    assert error.path == "/ckpt/w"
    assert "/ckpt/w: No such file or directory" in str(error)


def test_a_public_function_raises_megatrons_error_with_the_same_cause(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_bytes(b"\xff")

    with pytest.raises(CheckpointingException) as caught:
        dist_ckpt_strategies.load({}, tmp_path)
    assert isinstance(caught.value, IncompleteCheckpointError)
    assert isinstance(caught.value.__cause__, UnicodeDecodeError)
