"""The commands on the pages of old checkpoints and of conversion print what the pages say."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path
from shutil import copytree

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from dist_ckpt_strategies.cli.app import app
from dist_ckpt_strategies.formats.objects import dump_object, load_pickle
from dist_ckpt_strategies.megatron.types import default_allowed
from tests.golden.sets import GoldenSet
from tests.support.pages import ROOT, blocks_of

PAGE = ROOT / "docs" / "migrate.md"
CONVERT_PAGE = ROOT / "docs" / "convert.md"
MEASURED = re.compile(r"\d[\d.]* (?:s\b|MB/s)")


def shown() -> list[tuple[list[str], str]]:
    """Commands over OLD and NEW, with what stands behind them."""
    return [
        (commands.splitlines(), output)
        for (language, commands), (kind, output) in pairwise(blocks_of(PAGE))
        if (language, kind) == ("bash", "text") and " OLD" in commands
    ]


def unmeasured(text: str) -> list[str]:
    return [MEASURED.sub("…", line) for line in text.splitlines()]


def test_the_commands_print_what_the_page_says(
    flat: GoldenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("OLD").symlink_to(flat.checkpoint)
    steps = shown()

    assert [len(commands) for commands, _ in steps] == [1, 3]
    for commands, expected in steps:
        printed = ""
        for command in commands:
            result = CliRunner().invoke(app, shlex.split(command)[1:])
            assert result.exit_code == 0, result.output
            printed += result.stdout.replace(f"{tmp_path}/", "")
        assert unmeasured(printed) == unmeasured(expected)


def output_on_the_page(ending: str) -> str:
    (found,) = [text for _, text in blocks_of(CONVERT_PAGE) if text.endswith(ending)]
    return found


def test_a_converted_checkpoint_is_equal_as_the_page_says(
    flat: GoldenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    target = tmp_path / "iter_0000001"
    printed = ""
    for words in (
        ["convert", flat.checkpoint, str(target), "--to", "zarr@2"],
        ["diff", flat.checkpoint, str(target)],
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        printed += result.stdout
    printed = printed.replace(flat.checkpoint, "/nemo/model_weights")
    printed = printed.replace(str(target), "/checkpoints/iter_0000001") + "the same\n"

    assert unmeasured(printed) == unmeasured(output_on_the_page("\nthe same\n"))


def test_differences_are_shown_as_the_page_says(
    flat: GoldenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    changed = Path(copytree(flat.checkpoint, tmp_path / "iter_0000200"))
    values = np.full(64, 0.9921875, ml_dtypes.bfloat16)
    (changed / "decoder.final_layernorm.weight" / "0").write_bytes(values.tobytes())
    (changed / "rng_state" / "shard_1.1_2.2.pt").unlink()
    common = changed / "common.pt"
    state = load_pickle(common.read_bytes(), str(common), "common state", default_allowed())
    common.write_bytes(dump_object({**state, "iteration": 200}, name="common state"))

    result = CliRunner().invoke(app, ["diff", flat.checkpoint, str(changed)])

    assert result.exit_code == 1
    printed = result.stdout.replace(str(changed), "/checkpoints/iter_0000200")
    printed = printed.replace(flat.checkpoint, "/checkpoints/iter_0000003")
    assert printed == output_on_the_page("19 object shards\n")
