"""torch.distributed.checkpoint over packs in object stores."""

from typing import Any

import pytest
import torch

from dist_ckpt_strategies.errors import CorruptCheckpointError
from dist_ckpt_strategies.integrations.dcp import load, save
from tests.support.folders import Folder


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_a_state_is_saved_twice_in_a_bucket_and_verified(in_bucket: Folder) -> None:
    for step in (1, 2):
        save({"w": torch.full((9,), step), "step": step}, in_bucket.address, no_dist=True)
    state: dict[str, Any] = {"w": torch.zeros(9, dtype=torch.int64), "step": 0}
    load(state, in_bucket.address, no_dist=True)
    assert (state["step"], state["w"].tolist()) == (2, [2] * 9)

    (pack,) = (name for name in in_bucket.names() if name.endswith(".safetensors"))
    content = bytearray(in_bucket.read(pack))
    content[8 + int.from_bytes(content[:8], "little")] ^= 1
    in_bucket.put(pack, bytes(content))
    with pytest.raises(CorruptCheckpointError):
        load(state, in_bucket.address, no_dist=True)
