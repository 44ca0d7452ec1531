"""One array of a checkpoint, read as someone does who has TensorStore and nothing of ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorstore as ts
import torch

from dist_ckpt_strategies.cli.demo.digest import digest_tensor
from dist_ckpt_strategies.cli.demo.task import DemoError

_NUM_VALUES = 4


@dataclass(frozen=True, slots=True)
class ArrayView:
    """What can be seen of an array from outside.

    Attributes:
        key: the array's name, which is its directory.
        metadata: its Zarr metadata, as JSON.
        first_values: the first few elements.
        nbytes: size of its elements, in bytes.
        digest: of its elements, comparable with that of the tensor in memory.
    """

    key: str
    metadata: str
    first_values: tuple[float, ...]
    nbytes: int
    digest: str


def read_with_tensorstore(checkpoint: Path, key: str) -> ArrayView:
    """Open and read one bfloat16 array.

    Args:
        checkpoint: its directory, an absolute path: TensorStore takes no other.
        key: name of the array.

    Raises:
        DemoError: TensorStore finds no such array there, or cannot read it.
    """
    path = str(checkpoint / key)
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": path}}
    try:
        store = ts.open(spec, open=True, read=True).result()
        elements = store.read().result()
    except ValueError as error:
        raise DemoError(f"tensorstore: {error}", key=key, path=path) from error
    tensor = torch.from_numpy(elements.view(np.int16)).view(torch.bfloat16)
    return ArrayView(
        key=key,
        metadata=json.dumps(store.spec().to_json()["metadata"]),
        first_values=tuple(float(x) for x in elements.reshape(-1)[:_NUM_VALUES]),
        nbytes=elements.nbytes,
        digest=digest_tensor(tensor),
    )
