"""Who takes part in the comparisons; light to import, unlike the contenders."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender in saves and loads, as the table knows it.

    Attributes:
        flushes: whether the files are on the disk when its ``save`` returns.
        loads: whether it takes part in loading.
        package: what has to be installed for it, if that is not a dependency of ours.
    """

    flushes: bool
    loads: bool = True
    package: str | None = None


RAW_FLUSHED: Final = "raw write+fsync"
RAW_PLAIN: Final = "raw write"
RAW_IN_MEGATRON: Final = "raw write+fsync in Megatron-Core"

ENTRIES: Final[Mapping[str, Entry]] = {
    RAW_FLUSHED: Entry(flushes=True),
    RAW_PLAIN: Entry(flushes=False, loads=False),
    RAW_IN_MEGATRON: Entry(flushes=True),
    "zarr 1": Entry(flushes=True),
    "zarr 2": Entry(flushes=True),
    "torch_dist": Entry(flushes=True, package="psutil"),
    "torch dcp": Entry(flushes=True),
    "torch.save": Entry(flushes=False),
    "safetensors": Entry(flushes=False, package="safetensors"),
}
"""Everyone who saves and loads, floors first: the ratios are to these."""

SAVE_LOAD_PACKAGES: Final = {name: entry.package for name, entry in ENTRIES.items()}


class Role(StrEnum):
    """What a contender is there for, where replicas load."""

    FLOOR = "floor"
    OURS = "ours"
    PEER = "peer"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """A contender where replicas load.

    Attributes:
        role: what it is there for.
        stored: the directory that it reads; the first contender of the same one saves into it.
        package: as in Entry.
    """

    role: Role
    stored: str
    package: str | None = None


READ_SHARES: Final = "raw read"
SEND_SHARES: Final = "gloo exchange"
TWO_STAGE_ZARR: Final = "two-stage, zarr 1"
TWO_STAGE_GLOO: Final = "two-stage, zarr 1, gloo alone"
TWO_STAGE_TORCH_DIST: Final = "two-stage, torch_dist"
PARALLEL: Final = "fully parallel"
PARALLEL_IN_PLACE: Final = "fully parallel, in place"
PLAIN_ZARR: Final = "plain, zarr 1"

_RAW: Final = "raw"
_ZARR: Final = "zarr 1"
_TORCH_DIST: Final = "torch_dist"

GROUP_ENTRIES: Final[Mapping[str, GroupEntry]] = {
    READ_SHARES: GroupEntry(Role.FLOOR, _RAW),
    SEND_SHARES: GroupEntry(Role.FLOOR, _RAW),
    TWO_STAGE_ZARR: GroupEntry(Role.OURS, _ZARR),
    TWO_STAGE_GLOO: GroupEntry(Role.OURS, _ZARR),
    TWO_STAGE_TORCH_DIST: GroupEntry(Role.OURS, _TORCH_DIST, "psutil"),
    PARALLEL: GroupEntry(Role.PEER, _TORCH_DIST, "psutil"),
    PARALLEL_IN_PLACE: GroupEntry(Role.PEER, _TORCH_DIST, "psutil"),
    PLAIN_ZARR: GroupEntry(Role.PLAIN, _ZARR),
}
"""Everyone who loads what all ranks want whole, the two parts of the floor first."""

GROUP_PACKAGES: Final = {name: entry.package for name, entry in GROUP_ENTRIES.items()}

RESHARD_PACKAGES: Final[Mapping[str, str | None]] = {
    READ_SHARES: None,
    "zarr 2": None,
    "zarr 1": None,
    "torch_dist": "psutil",
}
"""Everyone who loads in another layout, the floor first, and the package that each needs."""

MEMCPY: Final = "memcpy"
IDLE: Final = "idle"
RAW_WRITER: Final = "raw writer"
ASYNC_ZARR_2: Final = "zarr 2"
ASYNC_ZARR_1: Final = "zarr 1"
QUEUE: Final = "torch_dist, queue"

ASYNC_PACKAGES: Final[Mapping[str, str | None]] = {
    MEMCPY: None,
    IDLE: None,
    RAW_WRITER: None,
    ASYNC_ZARR_2: None,
    ASYNC_ZARR_1: None,
    QUEUE: "psutil",
}
"""Everyone who saves behind training, floors first, and the package that each needs."""

BLOCKING_ONLY: Final = frozenset({MEMCPY})
TRAINING_ONLY: Final = frozenset({IDLE, RAW_WRITER})
"""Floors of one part of the benchmark."""

READ_FILES: Final = "raw read"
COPY_FILES: Final = "raw copy"
VERIFY: Final = "verify"
TO_ZARR_2: Final = "to zarr 2"
TO_TORCH_DIST: Final = "to torch_dist"
VERIFY_BY_TWO: Final = "verify, 2 processes"
TO_ZARR_2_BY_TWO: Final = "to zarr 2, 2 processes"

TOOL_PACKAGES: Final[Mapping[str, str | None]] = {
    READ_FILES: None,
    COPY_FILES: None,
    VERIFY: None,
    TO_ZARR_2: None,
    TO_TORCH_DIST: None,
    VERIFY_BY_TWO: None,
    TO_ZARR_2_BY_TWO: None,
}
"""The tools, floors first, and the package that each needs."""

RAW_PUT: Final = "tensorstore put"
BOTO3_PUT: Final = "boto3 put"

STORE_PACKAGES: Final[Mapping[str, str | None]] = {
    RAW_PUT: None,
    BOTO3_PUT: "boto3",
    "zarr 2": None,
}
"""Everyone who saves to an object store, floors first, and the package that each needs."""


LOCAL_FLOOR: Final = "floor"
NEW_MEMORY_FLOOR: Final = "floor, new memory"
LOCAL_MANAGER: Final = "local manager"
NVRX: Final = "nvrx"
FLUSHED_NVRX: Final = "nvrx, flushed"

LOCAL_PACKAGES: Final[Mapping[str, str | None]] = {
    LOCAL_FLOOR: None,
    NEW_MEMORY_FLOOR: None,
    LOCAL_MANAGER: None,
    NVRX: "nvidia_resiliency_ext",
    FLUSHED_NVRX: "nvidia_resiliency_ext",
}
"""Everyone who keeps checkpoints on the nodes' own disks, floors first."""


def missing_package(package: str | None) -> str | None:
    """What a contender lacks, as a sentence; None where its package can be imported."""
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed"
