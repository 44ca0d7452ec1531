"""The registry of strategies: ours, the default one, and Megatron-Core's own, if it has one."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import base

import dist_ckpt_strategies
from dist_ckpt_strategies import StrategyAction, register
from dist_ckpt_strategies.config import LocalOptions, Options
from dist_ckpt_strategies.errors import IncompatibleVersionError, StrategyError
from dist_ckpt_strategies.strategies.common import TorchCommonLoadStrategy, TorchCommonSaveStrategy
from dist_ckpt_strategies.strategies.registry import get_default_strategy, register_default_strategy
from dist_ckpt_strategies.strategies.tensorstore import TensorStoreLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from tests.support.processes import run_script
from tests.support.registries import fresh_registries

KEY = (StrategyAction.SAVE_SHARDED, "mine", 1)


class Foreign:
    """A strategy that another package put into Megatron's registry."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """See LoadShardedStrategy."""


class Own:
    """A user's strategy, which leaves one file."""

    backend, version = "mine", 1

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """See SaveShardedStrategy."""
        del sharded_state_dict
        Path(checkpoint_dir, "own").touch()


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    with fresh_registries():
        yield


# Look-ups


def test_an_unknown_key_is_an_error_that_lists_the_registered_ones() -> None:
    with pytest.raises(StrategyError, match="registered: none"):
        get_default_strategy(*KEY)
    register_default_strategy(StrategyAction.LOAD_COMMON, "b", 2, dict)

    with pytest.raises(StrategyError, match=r"'mine', 1\); registered: \(load_common, 'b', 2\)"):
        get_default_strategy(*KEY)


def test_an_instance_is_returned_and_a_callable_is_called_once() -> None:
    strategy = Foreign()
    for version, made in enumerate((strategy, Foreign, partial(Foreign))):
        key = (StrategyAction.LOAD_SHARDED, "mine", version)
        register_default_strategy(*key, made)
        register_default_strategy(*key, made)  # changes nothing
        with pytest.raises(StrategyError, match="replace=True"):
            register_default_strategy(*key, dict)
        found = get_default_strategy(*key)
        assert found is strategy if version == 0 else isinstance(found, Foreign)
        assert get_default_strategy(*key) is found
        register_default_strategy(*key, dict, replace=True)
        assert get_default_strategy(*key) == {}


@pytest.mark.parametrize(
    ("key", "strategy"),
    [
        ((StrategyAction.SAVE_SHARDED, "mine", "1"), dict),
        ((StrategyAction.SAVE_SHARDED, None, 1), dict),
        ((StrategyAction.SAVE_SHARDED, "a number", 1), 5),
        ((5, "mine", 1), dict),
    ],
)
def test_invalid_keys_and_strategies_are_refused(key: Any, strategy: Any) -> None:
    action, backend, version = key
    with pytest.raises(StrategyError, match="expected an action, a str, an int and a strategy"):
        register_default_strategy(action, backend, version, strategy)


def test_a_load_strategy_does_not_save(tmp_path: Path) -> None:
    register_default_strategy(StrategyAction.SAVE_SHARDED, "a loader", 1, ZarrLoadShardedStrategy())
    with pytest.raises(StrategyError, match=r"'a loader', 1\): expected a SaveShardedStrategy"):
        dist_ckpt_strategies.save({}, tmp_path / "c", ("a loader", 1))


# What register() does


def test_the_same_registration_again_changes_nothing_and_another_needs_replace() -> None:
    key, options = (StrategyAction.SAVE_SHARDED, "zarr", 1), Options(timeout_s=77.0)
    register(options=options, local=LocalOptions(replication_jump=2), allow=[Own])
    before = get_default_strategy(*key)
    register(options=replace(options), local=LocalOptions(replication_jump=2), allow=[Own])
    others: list[dict[str, Any]] = [
        {},
        {"options": Options(timeout_s=60.0)},
        {"options": options, "allow": [Own]},
        {"options": options, "local": LocalOptions(replication_jump=2)},
    ]
    for other in others:
        with pytest.raises(StrategyError, match="replace=True"):
            register(**other)
        assert get_default_strategy(*key) is base.get_default_strategy(*key) is before
        assert before.options.timeout_s == 77.0

    register(**others[1], replace=True)
    assert get_default_strategy(*key).options.timeout_s == 60.0
    assert base.get_default_strategy(*key) is get_default_strategy(*key)


@pytest.mark.parametrize("comes_first", ["save", "registration"])
def test_an_own_registration_works_before_and_after_a_save(
    comes_first: str, tmp_path: Path
) -> None:
    """A tuple leads to the own strategy from the registration on."""
    own, key = Own(), (StrategyAction.SAVE_SHARDED, "zarr", 1)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
    if comes_first == "save":
        dist_ckpt_strategies.save(dict(state), tmp_path / "before", key[1:])
        assert not (tmp_path / "before" / "own").exists()
        (tmp_path / "before" / "metadata.json").unlink()
    files = set(tmp_path.rglob("*"))
    register_default_strategy(*key, own)
    for name in ("before", "after"):
        dist_ckpt_strategies.save(dict(state), tmp_path / name, key[1:])
        assert (tmp_path / name / "own").exists()
    assert files <= set(tmp_path.rglob("*")), "nothing is removed unasked"
    with pytest.raises(StrategyError, match="replace=True"):
        register_default_strategy(*key, Own())
    with pytest.raises(StrategyError, match="Own"):
        register()
    register_default_strategy(*key, own)
    assert get_default_strategy(*key) is own


def test_megatrons_and_foreign_strategies_are_replaced_only_where_that_is_asked_for() -> None:
    common, key = (StrategyAction.LOAD_COMMON, "torch", 1), (StrategyAction.LOAD_SHARDED, "zarr", 1)
    before, theirs = base.get_default_strategy(*common), Foreign()
    base.register_default_strategy(*key, theirs)

    with pytest.raises(StrategyError, match="Foreign"):
        register()
    assert base.get_default_strategy(*key) is theirs
    assert key[1:] not in base.default_strategies[StrategyAction.SAVE_SHARDED.value]

    register(replace=True)
    assert isinstance(base.get_default_strategy(*key), ZarrLoadShardedStrategy)
    assert base.get_default_strategy(*common) is before
    register(replace=True, replace_common=True)
    assert isinstance(base.get_default_strategy(*common), TorchCommonLoadStrategy)


def test_the_older_registrations_of_format_1_are_understood() -> None:
    for _ in range(2):
        dist_ckpt_strategies.register_default_zarr_strategies()
        dist_ckpt_strategies.register_default_tensorstore_strategies()
    saver = base.get_default_strategy(StrategyAction.SAVE_SHARDED, "zarr", 1)
    loader = base.get_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 1)
    assert isinstance(saver, ZarrSaveShardedStrategy)
    assert isinstance(loader, TensorStoreLoadShardedStrategy)


# The classes without a registry


@pytest.mark.parametrize("make", [ZarrLoadShardedStrategy, TensorStoreLoadShardedStrategy])
def test_another_format_is_refused_by_name(make: Any) -> None:
    loader, common = make(), TorchCommonLoadStrategy()
    loader.check_backend_compatibility("zarr")
    loader.check_version_compatibility(1)
    common.check_backend_compatibility("torch")
    common.check_version_compatibility(1)

    for check, argument, named in [
        (loader.check_backend_compatibility, "torch_dist", "'torch_dist'"),
        (loader.check_version_compatibility, 2, "2"),
        (loader.check_version_compatibility, "1", r"\('zarr', '1'\)"),
        (common.check_backend_compatibility, "zarr", "'zarr'"),
        (common.check_version_compatibility, 2, "2"),
    ]:
        with pytest.raises(IncompatibleVersionError, match=named) as caught:
            check(argument)
        assert isinstance(caught.value, CheckpointingException)


@pytest.mark.parametrize("make", [ZarrSaveShardedStrategy, TorchCommonSaveStrategy])
def test_a_save_strategy_cannot_be_made_for_another_format(make: Any) -> None:
    with pytest.raises(IncompatibleVersionError, match=r"found \('other', 1\)"):
        make("other", 1)


# Later releases of Megatron-Core, which have none


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("release", ["0.17", "0.20"])
def test_every_way_works_beside_a_later_release(release: str, tmp_path: Path) -> None:
    source = Path(__file__).with_name("later_megatron.py")
    script = Path(shutil.copy(source, tmp_path / "script.py"))

    done = run_script(script, str(tmp_path), release)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("this release of Megatron-Core has no registry"), done.stdout
