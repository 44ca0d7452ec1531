"""Digests of tensors, and how two sets of them compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_OPTIMIZER_PREFIX = "optimizer.state."
WEIGHTS = "weights"
_MASTER = "fp32 master"
_KIND_NAMES = {"param": _MASTER, "fp32_param": _MASTER}


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many tensors of one kind are bit-identical.

    Attributes:
        kind: ``weights``, or what the optimizer calls its state.
        num_expected: tensors that there were.
        differing: keys of those that differ, are missing or were not there before.
    """

    kind: str
    num_expected: int
    differing: tuple[str, ...]


def digest_tensor(tensor: torch.Tensor) -> str:
    """The digest of a tensor's dtype, shape and bytes, in hexadecimal."""
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    body = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.blake2b(head, digest_size=16)
    digest.update(body.data)
    return digest.hexdigest()


def compare_digests(expected: Mapping[str, str], found: Mapping[str, str]) -> tuple[Agreement, ...]:
    """How two states compare, by kind of tensor: weights first, then the optimizer's by name.

    Args:
        expected: digest of every global tensor, by key.
        found: the same, of the other state.
    """
    kinds: dict[str, list[str]] = {}
    for key in sorted(expected.keys() | found.keys()):
        kinds.setdefault(_kind(key), []).append(key)
    return tuple(
        Agreement(
            kind,
            sum(key in expected for key in keys),
            tuple(key for key in keys if expected.get(key) != found.get(key)),
        )
        for kind, keys in sorted(kinds.items(), key=lambda item: (item[0] != WEIGHTS, item[0]))
    )


def _kind(key: str) -> str:
    if not key.startswith(_OPTIMIZER_PREFIX):
        return WEIGHTS
    name = key.removeprefix(_OPTIMIZER_PREFIX).split(".", 1)[0]
    return _KIND_NAMES.get(name, name)
