"""A format 2 checkpoint with a CRC32C after every inner chunk, which no release writes any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import CorruptCheckpointError
from dist_ckpt_strategies.formats.scan import scan, verify
from tests.golden.sets import GoldenSet

SAVED = {
    "w.bf16": torch.arange(400 * 300).reshape(400, 300).to(torch.bfloat16),
    "w.odd": torch.arange(7 * 11 * 13, dtype=torch.int32).reshape(7, 11, 13),
    "w.scalar": torch.tensor(2.5, dtype=torch.float64),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return GoldenSet.unpack("format2_crc32c", tmp_path).folder


def load(checkpoint: Path) -> Any:
    wanted = {
        key: ShardedTensor.from_rank_offsets(key, torch.empty_like(tensor))
        for key, tensor in SAVED.items()
    }
    return dist_ckpt_strategies.load(
        wanted | {"o": ShardedObject("o", None, (1,), (0,))}, checkpoint
    )


def test_it_loads_whole_and_verifies(checkpoint: Path) -> None:
    loaded = load(checkpoint)

    assert all(torch.equal(loaded[key], tensor) for key, tensor in SAVED.items())
    assert torch.equal(loaded["o"]["seed"], torch.arange(4))
    assert loaded["iteration"] == 7
    assert verify(scan(checkpoint)) == ()


def test_a_slice_of_one_inner_chunk_loads(checkpoint: Path) -> None:
    slice_ = ShardedTensor.from_rank_offsets(
        "w.bf16", torch.empty(10, 300, dtype=torch.bfloat16), (0, 35, 40)
    )

    loaded: Any = dist_ckpt_strategies.load({"w": slice_}, checkpoint)

    assert torch.equal(loaded["w"], SAVED["w.bf16"][350:360])


@pytest.mark.parametrize("byte_offset", [7, 200 * 300 * 2 + 1, 200 * 300 * 2 + 9])
def test_a_flipped_byte_is_found(checkpoint: Path, byte_offset: int) -> None:
    """In an inner chunk, in the CRC32C behind it, and in the next inner chunk."""
    path = checkpoint / "arrays/w.bf16/c.0.0"
    content = bytearray(path.read_bytes())
    content[byte_offset] ^= 1
    path.write_bytes(content)

    with pytest.raises(CorruptCheckpointError, match=r"w\.bf16"):
        load(checkpoint)
    assert [issue.path for issue in verify(scan(checkpoint))] == ["arrays/w.bf16/c.0.0"]


def test_nothing_writes_it() -> None:
    with pytest.raises(TypeError, match="crc32c"):
        dist_ckpt_strategies.Options(crc32c=True)  # type: ignore[call-arg]
