"""Who takes part in the comparison of saves and loads; light to import, unlike the contenders."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender, as the table knows it.

    Attributes:
        flushes: whether the files are on the disk when its ``save`` returns.
        loads: whether it takes part in loading.
        package: what has to be installed for it, if that is not a dependency of ours.
    """

    flushes: bool
    loads: bool = True
    package: str | None = None

    @property
    def is_installed(self) -> bool:
        """Whether its package can be imported."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


RAW_FLUSHED: Final = "raw write+fsync"
RAW_PLAIN: Final = "raw write"

ENTRIES: Final[Mapping[str, Entry]] = {
    RAW_FLUSHED: Entry(flushes=True),
    RAW_PLAIN: Entry(flushes=False, loads=False),
    "zarr 1": Entry(flushes=True),
    "torch_dist": Entry(flushes=True, package="psutil"),
    "torch dcp": Entry(flushes=True),
    "torch.save": Entry(flushes=False),
    "safetensors": Entry(flushes=False, package="safetensors"),
}
"""Everyone, floors first: the ratios are to these."""
