"""Errors name what is at fault, and stay the same on their way between ranks and processes."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
from megatron.core.dist_checkpointing.core import CheckpointingException

from dist_ckpt_strategies import errors
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NoReplicasAvailableError,
    PeerError,
    PeerTimeoutError,
    StorageError,
    error_from_peer,
    kind_of,
)
from dist_ckpt_strategies.megatron.errors import as_megatron_error, raises_megatron_errors

EVERY_ERROR = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, CheckpointError)
]
EVERY_KIND = pytest.mark.parametrize("kind", EVERY_ERROR, ids=lambda kind: kind.__name__)


class OfAnotherPackageError(StorageError):
    """A class that somebody derived from ours."""


def made(kind: type[CheckpointError]) -> CheckpointError:
    details = {"key": "layer.w", "path": "/ckpt/layer.w/0.0"}
    if issubclass(kind, PeerError):
        return kind(3, "layer.w: broken", **details)
    return kind("layer.w: broken", **details)


def facts(error: CheckpointError) -> tuple[Any, ...]:
    rank = error.rank if isinstance(error, PeerError) else None
    return (error.key, error.path, error.global_rank, error.message, str(error), error.args, rank)


def test_there_are_errors_to_test() -> None:
    assert len(EVERY_ERROR) > 20


@EVERY_KIND
def test_every_error_names_key_file_and_message(kind: type[CheckpointError]) -> None:
    error = made(kind)

    assert error.message == "layer.w: broken"
    assert (error.key, error.path) == ("layer.w", "/ckpt/layer.w/0.0")
    assert str(error).endswith("layer.w: broken")


@EVERY_KIND
def test_an_error_says_the_rank_it_happened_on(kind: type[CheckpointError]) -> None:
    error = made(kind)

    assert error.at_rank(7) is error
    assert error.global_rank == 7
    assert str(error) == "rank 7: layer.w: broken"
    assert error.message == "layer.w: broken"


@EVERY_KIND
def test_an_error_is_caught_by_the_builtin_one_expects(kind: type[CheckpointError]) -> None:
    builtins = {
        "PlanError": ValueError,
        "StrategyNotFoundError": LookupError,
        "ArrayNotFoundError": FileNotFoundError,
        "CheckpointNotFoundError": FileNotFoundError,
        "CheckpointExistsError": FileExistsError,
        "PeerTimeoutError": TimeoutError,
        "MissingDependencyError": ImportError,
    }
    expected = builtins.get(kind.__name__, Exception)

    with pytest.raises(expected):
        raise made(kind)


@EVERY_KIND
def test_an_error_survives_pickling_and_copying(kind: type[CheckpointError]) -> None:
    error = made(kind).at_rank(5)
    error.add_note("seen while saving")

    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is kind
        assert facts(other) == facts(error)
        assert other.__notes__ == ["seen while saving"]


@EVERY_KIND
def test_the_error_of_a_peer_is_of_the_same_class_and_says_whose_it_was(
    kind: type[CheckpointError],
) -> None:
    error = error_from_peer(2, kind.__name__, "w: broken", key="w", path="/w")

    assert isinstance(error, PeerError)
    assert isinstance(error, kind)
    assert (error.rank, error.global_rank, error.key, error.path) == (2, 2, "w", "/w")
    assert str(error) == "rank 2: w: broken"


@EVERY_KIND
def test_the_error_of_a_peer_survives_pickling(kind: type[CheckpointError]) -> None:
    error = error_from_peer(2, kind.__name__, "w: broken", key="w", path="/w")
    other = pickle.loads(pickle.dumps(error))

    assert isinstance(other, PeerError)
    assert isinstance(other, kind)
    assert type(other).__name__ == type(error).__name__
    assert facts(other) == facts(error)


@pytest.mark.parametrize("kind", ["", "OSError", "SomethingNewError", "__class__"])
def test_a_class_that_this_package_does_not_know_becomes_a_peer_error(kind: str) -> None:
    error = error_from_peer(2, kind, "broken")

    assert type(error) is PeerError
    assert str(error) == "rank 2: broken"


@EVERY_KIND
def test_the_kind_of_an_error_leads_to_the_same_class_again(kind: type[CheckpointError]) -> None:
    once = error_from_peer(2, kind_of(made(kind)), "broken")
    twice = error_from_peer(2, kind_of(once), "broken")

    assert isinstance(once, kind)
    assert isinstance(twice, kind)


def test_the_kind_of_a_derived_or_translated_error_is_ours() -> None:
    translated = as_megatron_error(CorruptCheckpointError("broken"))

    assert kind_of(OfAnotherPackageError("broken")) == "StorageError"
    assert kind_of(translated) == "CorruptCheckpointError"
    peer = as_megatron_error(error_from_peer(1, "CorruptCheckpointError", "broken"))
    assert kind_of(peer) == "CorruptCheckpointError"


def test_what_faces_translated_does_not_change_what_peers_report() -> None:
    as_megatron_error(StorageError("broken"))

    assert not isinstance(error_from_peer(1, "StorageError", "x"), CheckpointingException)


@EVERY_KIND
def test_at_a_face_an_error_is_megatrons_too_and_loses_nothing(
    kind: type[CheckpointError],
) -> None:
    error = made(kind).at_rank(4)
    translated = as_megatron_error(error)

    assert isinstance(translated, CheckpointingException)
    assert isinstance(translated, kind)
    assert type(translated).__name__ == kind.__name__
    assert facts(translated) == facts(error)
    assert as_megatron_error(translated) is translated


@EVERY_KIND
def test_a_translated_error_survives_pickling(kind: type[CheckpointError]) -> None:
    for error in (
        as_megatron_error(made(kind)),
        as_megatron_error(error_from_peer(2, kind.__name__, "broken", key="w", path="/w")),
    ):
        other = pickle.loads(pickle.dumps(error))
        assert isinstance(other, kind)
        assert isinstance(other, CheckpointingException)
        assert facts(other) == facts(error)


def test_a_face_raises_megatrons_error_with_the_same_cause() -> None:
    cause = OSError("disk")

    @raises_megatron_errors
    def face() -> None:
        raise IncompleteCheckpointError("gone", key="w") from cause

    with pytest.raises(CheckpointingException, match="gone") as caught:
        face()
    assert isinstance(caught.value, IncompleteCheckpointError)
    assert caught.value.__cause__ is cause


def test_a_face_lets_other_errors_pass() -> None:
    @raises_megatron_errors
    def face() -> None:
        raise KeyError("k")

    with pytest.raises(KeyError):
        face()


def test_a_peer_that_cannot_be_told_is_no_rank() -> None:
    error = PeerTimeoutError(None, "a peer did not arrive")

    assert error.rank is None
    assert str(error) == "a peer did not arrive"


def test_a_not_found_error_is_no_system_error_with_a_number() -> None:
    error = ArrayNotFoundError("w: gone", key="w", path="/w")

    assert error.errno is None
    assert str(error) == "w: gone"


def test_a_derived_class_of_somebody_else_pickles_as_itself() -> None:
    other = pickle.loads(pickle.dumps(OfAnotherPackageError("x", key="w")))

    assert type(other) is OfAnotherPackageError
    assert other.key == "w"


def test_no_replicas_is_the_same_class_on_every_rank() -> None:
    assert type(error_from_peer(1, "NoReplicasAvailableError", "x")) is NoReplicasAvailableError
