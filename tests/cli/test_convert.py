"""``dist-ckpt convert``, ``upgrade`` and ``diff``: what they print, and their exit status."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.app import app
from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.errors import IncompleteCheckpointError
from tests.support.checkpoints import (
    EMPTY,
    NESTED,
    RNG,
    SCALAR,
    WEIGHT,
    write_array,
    write_checkpoint,
    write_object,
)
from tests.support.samples import random_values


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, args)])


def test_a_checkpoint_is_converted_and_equal(written: Path, tmp_path: Path) -> None:
    result = run("convert", written, tmp_path / "c", "--to", "zarr@2")
    as_json = run("convert", written, tmp_path / "d", "--to", "zarr@1", "--json", "--memory", "1")

    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{tmp_path / 'c'}\n4 arrays with 114 B, 5 object shards; ")
    assert result.stderr == ""
    found = json.loads(as_json.stdout)
    assert found.pop("seconds") > 0
    assert found == {
        "schema": 2,
        "command": "convert",
        "source": str(written),
        "target": str(tmp_path / "d"),
        "num_arrays": 4,
        "num_objects": 5,
        "nbytes": 114,
    }
    compared = run("diff", written, tmp_path / "c")
    assert compared.exit_code == 0
    assert compared.stdout == (
        f"{written} and {tmp_path / 'c'} are equal\n"
        "compared: 4 arrays with 114 B, 5 object shards\n"
    )


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_files_of_safetensors_are_no_damaged_checkpoint(
    written: Path, tmp_path: Path, command: str
) -> None:
    run("convert", written, tmp_path / "model", "--to", "safetensors")

    found = run(command, tmp_path / "model")

    assert (found.exit_code, found.stdout) == (3, "")
    assert found.stderr.startswith(f"error: {tmp_path}/model is no checkpoint: it holds files of ")
    assert "the library safetensors reads them" in found.stderr
    with pytest.raises(IncompleteCheckpointError, match="it holds files of safetensors"):
        dist_ckpt_strategies.load({}, tmp_path / "model")


def rewritten(root: Path, key: str, values: Any, chunk: tuple[int, ...] | None = None) -> None:
    for path in (root / key).glob("*"):
        if path.suffix != ".pt":
            path.unlink()
    write_array(root, values, key=key, chunk=chunk)


def change_values(root: Path) -> None:
    values = random_values((4, 6), DType.FLOAT32)
    values[2, 3] = 1.5
    rewritten(root, WEIGHT, values, (2, 2))


def change_shape(root: Path) -> None:
    rewritten(root, NESTED, np.zeros(6, np.float32))


def change_dtype(root: Path) -> None:
    rewritten(root, SCALAR, np.array(3.0, np.float32))


def remove_array(root: Path) -> None:
    for path in (root / EMPTY).iterdir():
        path.unlink()


def change_object(root: Path) -> None:
    write_object(root / RNG / "shard_0.1_2.2.pt", {"state": [0, 1, 2, 99]})


def remove_object(root: Path) -> None:
    (root / RNG / "shard_1.1_2.2.pt").unlink()


def change_common(root: Path) -> None:
    write_object(root / "common.pt", {"iteration": 8, "new": 1})


CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (change_values, f"{WEIGHT}: 1 element differs, the first at [2, 3]: "),
    (change_shape, f"{NESTED}: shape (5,) and (6,)"),
    (change_dtype, f"{SCALAR}: dtype float64 and float32"),
    (remove_array, f"{EMPTY}: only in the first"),
    (change_object, f"{RNG}/shard_0.1_2.2: ['state']: 9 elements and 4 elements"),
    (remove_object, f"{RNG}/shard_1.1_2.2: only in the first"),
    (change_common, "common.pt: ['iteration']: 7 and 8\ncommon.pt: ['new']: nothing and 1"),
]


@pytest.mark.parametrize(("change", "text"), CHANGES)
def test_each_difference_is_reported_and_ends_with_status_1(
    written: Path, checkpoint: Path, change: Callable[[Path], None], text: str
) -> None:
    change(checkpoint)

    result = run("diff", written, checkpoint)

    assert result.exit_code == 1, result.stderr
    assert f"{text}\n" in result.stdout or (text.endswith(": ") and text in result.stdout)
    assert f"{written} and {checkpoint} DIFFER\n" in result.stdout
    assert json.loads(run("diff", written, checkpoint, "--json").stdout)["equal"] is False


def values_compared(tmp_path: Path, one: Any, two: Any) -> dict[str, Any]:
    for name, values in (("one", one), ("two", two)):
        root = write_checkpoint(tmp_path / name)
        write_array(root, values, key="v", chunk=(3,) * values.ndim)
    result = run("diff", tmp_path / "one", tmp_path / "two", "--json", "--keys", "v")
    assert result.exit_code == 1, result.stderr
    (found,) = json.loads(result.stdout)["arrays"]
    return dict(found)


LARGE = 2**62


@pytest.mark.parametrize(
    ("one", "two", "first", "num_differing", "largest"),
    [
        (np.array([1.0, 2.0, 5.0]), np.array([1.0, 3.5, 9.0]), [1], 2, 4.0),
        (np.array([math.nan, 1.0]), np.array([0.0, 1.0]), [0], 1, None),
        (np.array([0.0]), np.array([-0.0]), [0], 1, 0.0),
        (np.array([math.inf]), np.array([1.0]), [0], 1, "inf"),
        (np.array([LARGE]), np.array([LARGE + 1]), [0], 1, 1.0),
        (np.array([200], np.uint8), np.array([10], np.uint8), [0], 1, 190.0),
        (np.array([True, False]), np.array([True, True]), [1], 1, 1.0),
        (np.array([3 + 4j]), np.array([0j]), [0], 1, 5.0),
    ],
    ids=str,
)
def test_values_are_compared_to_the_bit_and_measured(
    tmp_path: Path, one: Any, two: Any, first: list[int], num_differing: int, largest: Any
) -> None:
    found = values_compared(tmp_path, one, two)

    assert found["index"] == first
    assert found["num_differing"] == num_differing
    assert found["max_abs_difference"] == largest
    assert (found["a"], found["b"]) == (str(one[first[0]]), str(two[first[0]]))
