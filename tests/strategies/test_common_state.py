"""Common state and objects: in Megatron-Core's files, read with an allow-list."""

from __future__ import annotations

import io
from argparse import Namespace
from pathlib import Path
from signal import Signals
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend

from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.formats.commit import OLD_MARKER_NAME
from dist_ckpt_strategies.formats.locations import is_finished
from dist_ckpt_strategies.strategies.common import (
    TorchCommonLoadStrategy,
    TorchCommonSaveStrategy,
)


class Homemade:
    """A class of a user's own."""

    def __init__(self, value: int) -> None:
        self.value = value


def like_a_megatron_run() -> dict[str, Any]:
    """What Megatron-LM's training script keeps in the common state."""
    return {
        "args": Namespace(
            attention_backend=AttnBackend.auto,
            exit_signal=Signals.SIGTERM,
            params_dtype=torch.bfloat16,
            save=Path("run") / "ckpt",
            lr=1e-4,
        ),
        "checkpoint_version": 3.0,
        "iteration": 1200,
        "model_type": ModelType.encoder_or_decoder,
        "opt_param_scheduler": {"max_lr": 3e-4, "num_steps": 1200},
        "optimizer_config": OptimizerConfig(lr=1e-4),
        "num_floating_point_operations_so_far": 1.5e18,
        "rng": np.random.default_rng(1).integers(0, 9, 624).astype(np.uint32),
        "scalar": np.float64(2.5),
        "extra": SimpleNamespace(step=torch.tensor(7), blob=io.BytesIO(b"abc")),
        "wandb": None,
    }


def test_the_common_state_of_a_megatron_run_comes_back(tmp_path: Path) -> None:
    state = like_a_megatron_run()
    TorchCommonSaveStrategy().save_common(state, tmp_path)
    found = TorchCommonLoadStrategy().load_common(tmp_path)

    assert list(found) == list(state)
    assert found["args"] == state["args"]
    assert found["optimizer_config"] == state["optimizer_config"]
    np.testing.assert_array_equal(found["rng"], state["rng"])
    assert found["scalar"] == state["scalar"]
    assert found["extra"].blob.getvalue() == b"abc"
    for key in ("model_type", "iteration", "opt_param_scheduler", "checkpoint_version", "wandb"):
        assert found[key] == state[key]


def test_what_torch_saved_we_load_and_what_we_save_torch_loads(tmp_path: Path) -> None:
    torch.save({"iteration": 3}, tmp_path / "common.pt")
    assert TorchCommonLoadStrategy().load_common(tmp_path) == {"iteration": 3}

    TorchCommonSaveStrategy().save_common({"iteration": 4}, tmp_path)
    assert torch.load(tmp_path / "common.pt", weights_only=True) == {"iteration": 4}


def test_saving_common_state_invalidates_an_older_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    TorchCommonSaveStrategy().save_common({}, tmp_path)

    assert not is_finished(tmp_path)
    assert (tmp_path / OLD_MARKER_NAME).exists()


def test_a_class_that_is_not_allowed_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UnsafeObjectError, match=r"Homemade.*allow="):
        TorchCommonSaveStrategy().save_common({"mine": Homemade(5)}, tmp_path)
    assert not (tmp_path / "common.pt").exists()
    TorchCommonSaveStrategy(allow=[Homemade]).save_common({"mine": Homemade(5)}, tmp_path)

    with pytest.raises(UnsafeObjectError, match=r"Homemade.*allow=") as caught:
        TorchCommonLoadStrategy().load_common(tmp_path)
    assert caught.value.path == str(tmp_path / "common.pt")
    found = TorchCommonLoadStrategy(allow=[Homemade]).load_common(tmp_path)
    assert found["mine"].value == 5


def test_a_missing_and_a_damaged_common_state_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpointError, match=r"common\.pt"):
        TorchCommonLoadStrategy().load_common(tmp_path)
    TorchCommonSaveStrategy().save_common({"w": torch.arange(100)}, tmp_path)
    content = bytearray((tmp_path / "common.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "common.pt").write_bytes(content)

    with pytest.raises(CorruptCheckpointError, match="damaged"):
        TorchCommonLoadStrategy().load_common(tmp_path)


@pytest.mark.parametrize("content", [[1], 5, None, torch.ones(2)], ids=str)
def test_common_state_that_is_no_dict_is_damaged(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "common.pt")

    with pytest.raises(CorruptCheckpointError, match="expected a dict"):
        TorchCommonLoadStrategy().load_common(tmp_path)


def test_objects_with_slashes_in_their_key_are_saved_found_and_loaded(tmp_path: Path) -> None:
    objects = {
        n: ShardedObject("layer/0/extra", {"n": n}, (2, 2), (n // 2, n % 2)) for n in range(4)
    }
    replica = ShardedObject("layer/0/extra", {"n": 9}, (2, 2), (0, 0), replica_id=1)
    saver, loader = TorchCommonSaveStrategy(), TorchCommonLoadStrategy()
    saver.save_sharded_objects({**objects, "replica": [replica]}, tmp_path)
    assert saver.can_handle_sharded_objects is loader.can_handle_sharded_objects is True

    assert set(loader.load_sharded_metadata(tmp_path)) == {o.unique_key for o in objects.values()}
    wanted = {n: ShardedObject("layer/0/extra", None, (2, 2), (n // 2, n % 2)) for n in range(4)}
    assert loader.load_sharded_objects(wanted, tmp_path) == {n: {"n": n} for n in range(4)}
