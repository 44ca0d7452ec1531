"""``dist-ckpt inspect`` and ``dist-ckpt verify``: what a checkpoint of any kind holds."""

from __future__ import annotations

import time
from pathlib import Path

from dist_ckpt_strategies.cli import formats, local
from dist_ckpt_strategies.cli.progress import open_progress, watched
from dist_ckpt_strategies.cli.render import print_summary
from dist_ckpt_strategies.cli.status import Status, status_of_issues
from dist_ckpt_strategies.formats.commit import complete_commit
from dist_ckpt_strategies.formats.issues import Scan, Watch
from dist_ckpt_strategies.formats.scan import scan, verify
from dist_ckpt_strategies.local.scan import LocalScan, scan_local, verify_local
from dist_ckpt_strategies.storage.urls import StoreUrl, parsed_address


def inspect_checkpoint(
    address: str, keys: str | None, *, with_objects: bool, as_json: bool
) -> Status:
    """Show the arrays and objects of a checkpoint, or the parts of local ones.

    Returns the exit status.

    Args:
        address: directory or URL of the checkpoint, or a directory of local ones.
        keys: show only keys, or ids of parts, that match this glob.
        with_objects: show objects too.
        as_json: print one JSON object.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        ArrayNotFoundError: no key matches.
    """
    found = _scanned(parsed_address(address, what="DIR"), None)
    if isinstance(found, LocalScan):
        summary = local.inspection_of(found, keys)
    else:
        summary = formats.inspection_of(found, keys, with_objects=with_objects)
    print_summary("inspect", summary, as_json=as_json)
    return status_of_issues(found.issues)


def verify_checkpoint(address: str, *, as_json: bool) -> Status:
    """Check a checkpoint and show what is wrong with it; returns the exit status.

    Args:
        address: directory or URL of the checkpoint, or a directory of local ones.
        as_json: print one JSON object.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
    """
    began = time.monotonic()
    place = parsed_address(address, what="DIR")
    if isinstance(place, Path) and place.is_dir():
        complete_commit(place)
    with open_progress() as progress:
        found = _scanned(place, watched(progress, "reading directories"))
        watch = watched(progress, "reading files")
        if isinstance(found, LocalScan):
            issues = verify_local(found, watch)
            summary = local.verification_of(found, issues, time.monotonic() - began)
        else:
            issues = verify(found, watch)
            summary = formats.verification_of(found, issues, time.monotonic() - began)
    print_summary("verify", summary, as_json=as_json)
    return status_of_issues(issues)


def _scanned(place: Path | StoreUrl, watch: Watch | None) -> Scan | LocalScan:
    if isinstance(place, StoreUrl):
        # TensorStore takes a while to import, and directories go without.
        from dist_ckpt_strategies.formats.locations import located  # noqa: PLC0415

        return scan(located(str(place), None))
    return scan_local(place) or scan(place, watch)
