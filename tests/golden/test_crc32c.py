"""A format 2 checkpoint with a CRC32C after every inner chunk, which no release writes any more."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import CorruptCheckpointError
from dist_ckpt_strategies.formats.scan import scan, verify
from tests.golden.sets import GoldenSet
from tests.support.checkpoints import flip_at

SAVED = {
    "w.bf16": torch.arange(400 * 300).reshape(400, 300).to(torch.bfloat16),
    "w.odd": torch.arange(7 * 11 * 13, dtype=torch.int32).reshape(7, 11, 13),
    "w.scalar": torch.tensor(2.5, dtype=torch.float64),
}


def load(checkpoint: Path) -> Any:
    """All arrays, ten rows of one, which lie in one inner chunk, and the object."""
    wanted: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, torch.empty_like(tensor))
        for key, tensor in SAVED.items()
    }
    rows = torch.empty(10, 300, dtype=torch.bfloat16)
    wanted["rows"] = ShardedTensor.from_rank_offsets("w.bf16", rows, (0, 35, 40))
    wanted["o"] = ShardedObject("o", None, (1,), (0,))
    return dist_ckpt_strategies.load(wanted, checkpoint, validate_access_integrity=False)


def test_it_loads_and_verifies_and_a_flipped_byte_is_found(tmp_path: Path) -> None:
    checkpoint = GoldenSet.unpack("format2_crc32c", tmp_path).folder
    loaded = load(checkpoint)

    assert all(torch.equal(loaded[key], tensor) for key, tensor in SAVED.items())
    assert torch.equal(loaded["rows"], SAVED["w.bf16"][350:360])
    assert torch.equal(loaded["o"]["seed"], torch.arange(4))
    assert loaded["iteration"] == 7
    assert verify(scan(checkpoint)) == ()
    path, end = checkpoint / "arrays/w.bf16/c.0.0", 200 * 300 * 2
    for at in (7, end + 1, end + 9):  # in an inner chunk, in its CRC32C, in the next inner chunk
        flip_at(path, at)
        with pytest.raises(CorruptCheckpointError, match=r"w\.bf16"):
            load(checkpoint)
        assert [issue.path for issue in verify(scan(checkpoint))] == ["arrays/w.bf16/c.0.0"]
        flip_at(path, at)
