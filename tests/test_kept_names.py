"""The names of other packages that this one keeps: where they are, how they are called.

``kept_names.txt`` has the names below this package as the references of the other packages state
them, with the parameters of what is called. HyperPod's states ``abort_instances`` of
``create_custom_abort`` as one name for a variable number of parts, and its trainer is a
StateProvider here, or has one. NVRx's own signatures are compared in ``tests/nvrx``, where it is
installed.
"""

from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from dist_ckpt_strategies import inprocess, local
from tests.support.kept import own_parameters, require_understood


def kept_names() -> dict[str, str | None]:
    """Every name with its parameters, or None for what is not called."""
    found: dict[str, str | None] = {}
    above = ""
    for line in Path(__file__).with_name("kept_names.txt").read_text().splitlines():
        name, call, parameters = line.strip().partition("(")
        if not line.startswith(" "):
            above = name
        else:
            name = above + name
        if name and not name.startswith("#"):
            found[name] = parameters.removesuffix(")") if call else None
    return found


KEPT = {
    name: parameters
    for name, parameters in kept_names().items()
    if not name.startswith("integrations.lightning.") or find_spec("lightning")
}


def found(name: str) -> Any:
    """What has a name below the package."""
    return resolve_name(f"dist_ckpt_strategies.{name}")


@pytest.mark.parametrize("name", KEPT)
def test_the_name_is_kept_and_calls_as_the_reference_states_them_are_understood(name: str) -> None:
    parameters = KEPT[name]
    assert found(name) is not None
    if parameters is not None:
        stated = eval(f"lambda {parameters}: None", {"timedelta": timedelta})  # noqa: S307 - our file
        require_understood(found(name), own_parameters(stated))


def test_a_class_of_ones_own_needs_the_members_that_the_reference_states_and_no_others() -> None:
    aware = "local.TensorAwareStateDict."
    members = {name.removeprefix(aware) for name in KEPT if name.startswith(aware)}
    strategies = {"replicate", "retrieve_execute", "retrieve_plan"}

    assert local.ReplicationStrategy.__abstractmethods__ == strategies
    assert local.LazyReplicationStrategyBuilder.__abstractmethods__ == {"_eager_build"}
    assert local.TensorAwareStateDict.__abstractmethods__ == members - {"values"}


def test_the_wrapper_takes_parameters_by_name_and_aborts_by_default() -> None:
    abort, *others = own_parameters(inprocess.HPWrapper)

    assert all(one.kind is one.KEYWORD_ONLY for one in others)
    (default_abort,) = abort.default.instances
    assert isinstance(default_abort, inprocess.HPAbortTorchDistributed)
