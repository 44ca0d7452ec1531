"""``dist-ckpt inspect``: what a checkpoint of any kind holds, as lists or as JSON."""

from __future__ import annotations

from pathlib import Path

from dist_ckpt_strategies.cli.format1 import inspect_format1
from dist_ckpt_strategies.cli.format2 import inspect_format2
from dist_ckpt_strategies.cli.locations import location_of, survey_of
from dist_ckpt_strategies.cli.parts import inspect_parts
from dist_ckpt_strategies.storage.format1.survey import survey_checkpoint
from dist_ckpt_strategies.storage.format2.survey import survey_format2
from dist_ckpt_strategies.storage.parts.survey import survey_parts


def inspect_checkpoint(
    address: str, keys: str | None, *, with_objects: bool, as_json: bool
) -> None:
    """Show the arrays and objects of a checkpoint, or the parts of local ones, and if it is whole.

    Args:
        address: directory or URL of the checkpoint, or a directory of local ones.
        keys: show only keys, or ids of parts, that match this glob.
        with_objects: show objects too.
        as_json: print one JSON object.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        ArrayNotFoundError: no key matches.
    """
    place = location_of(address)
    if not isinstance(place, Path):
        inspect_format2(survey_of(place), keys, with_objects=with_objects, as_json=as_json)
    elif local := survey_parts(place):
        inspect_parts(local, keys, as_json=as_json)
    elif recorded := survey_format2(place):
        inspect_format2(recorded, keys, with_objects=with_objects, as_json=as_json)
    else:
        survey = survey_checkpoint(place)
        inspect_format1(survey, keys, with_objects=with_objects, as_json=as_json)
