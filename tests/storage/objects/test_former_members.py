"""Members that an enum has lost since the checkpoint was written."""

from __future__ import annotations

import argparse
import io
import logging
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt_strategies.errors import CorruptCheckpointError
from dist_ckpt_strategies.storage.objects import former_members
from dist_ckpt_strategies.storage.objects.pickled import load_pickle


class Kind(Enum):
    """As it is now; it once had a 2 and a 3."""

    GPT = 1


class Mode(Enum):
    """As it is now; it once had an "off"."""

    ON = "on"


class Named:
    """Pickled as a member of an enum that was called so, with that value."""

    def __init__(self, kind: Any, value: Any) -> None:
        self.kind, self.value = kind, value

    def __reduce__(self) -> Any:
        return self.kind, (self.value,)


def archive_of(obj: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(obj, stream)
    return stream.getvalue()


def load(content: bytes) -> Any:
    allowed = [argparse.Namespace, Kind, Mode]
    return load_pickle(content, Path("common.pt"), "common state", allowed)


def test_a_member_that_is_gone_is_its_plain_value(caplog: pytest.LogCaptureFixture) -> None:
    state = {
        "args": argparse.Namespace(model_type=Named(Kind, 2), mode=Named(Mode, "off")),
        "kinds": [Named(Kind, 1), Named(Kind, 3)],
        "modes": [Named(Mode, "on")],
        "weights": torch.arange(100_000),
        "text": f"c{__name__}\nKind\n",
    }
    with caplog.at_level(logging.WARNING, former_members.logger.name):
        found = load(archive_of(state))

    assert (found["args"].model_type, found["args"].mode) == (2, "off")
    assert found["kinds"] == [Kind.GPT, 3]
    assert found["modes"] == [Mode.ON]
    assert torch.equal(found["weights"], torch.arange(100_000))
    assert found["text"] == state["text"]
    assert f"{__name__}.Kind has no member 2 any more; it is left as 2" in caplog.messages


def not_a_thing(value: object) -> None:
    raise ValueError(f"{value} is not a valid Thing")


def test_what_no_allowed_enum_says_stays_an_error() -> None:
    content = archive_of({"thing": Named(not_a_thing, 7)})

    with pytest.raises(CorruptCheckpointError, match="7 is not a valid Thing"):
        load_pickle(content, Path("common.pt"), "common state", [Kind, not_a_thing])


def asks_itself(value: int) -> Kind:
    return Kind(value)


def test_an_enum_that_something_else_asks_for_stays_an_error() -> None:
    content = archive_of({"kind": Named(asks_itself, 7)})

    with pytest.raises(CorruptCheckpointError, match="7 is not a valid Kind"):
        load_pickle(content, Path("common.pt"), "common state", [Kind, asks_itself])


def test_of_two_enums_of_one_name_the_one_that_is_asked_for_is_meant() -> None:
    namesake = Enum("namesake", {"ON": 1})
    namesake.__qualname__, namesake.__module__ = "Kind", "elsewhere"
    content = archive_of({"kind": Named(Kind, 2)})

    found = load_pickle(content, Path("common.pt"), "common state", [namesake, Kind])
    assert found == {"kind": 2}
