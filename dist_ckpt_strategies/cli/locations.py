"""What a command is pointed at: a directory, or a place in an object store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt_strategies.errors import IncompatibleVersionError
from dist_ckpt_strategies.storage.addresses import parsed_address
from dist_ckpt_strategies.storage.format2.survey import Format2Survey, survey_format2

if TYPE_CHECKING:  # TensorStore takes a while to import, and directories go without
    from dist_ckpt_strategies.storage.buckets.bucket import Bucket


def location_of(address: str) -> Path | Bucket:
    """The directory, absolute, or the place that an argument names.

    Raises:
        StrategyError: it is no address, or the environment makes no sense.
    """
    found = parsed_address(address, what="DIR")
    if isinstance(found, Path):
        return found
    from dist_ckpt_strategies.storage.locations import located  # noqa: PLC0415

    location: Path | Bucket = located(address, None)
    return location


def place_text(address: str) -> str:
    """An address as JSON has it: a directory's absolute path, or the URL."""
    return str(parsed_address(address))


def survey_of(bucket: Bucket) -> Format2Survey:
    """What a place in an object store holds.

    Raises:
        IncompatibleVersionError: no checkpoint of format ("zarr", 2).
    """
    survey = survey_format2(bucket)
    if survey is None:
        raise IncompatibleVersionError(
            f"{bucket}: there is something, but no checkpoint of format ('zarr', 2); object stores "
            "have no others"
        )
    return survey
