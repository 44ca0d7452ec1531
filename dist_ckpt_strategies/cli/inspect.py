"""``dist-ckpt inspect`` and ``dist-ckpt verify``: what a checkpoint of any kind holds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_ckpt_strategies.cli import formats, local
from dist_ckpt_strategies.cli.render import open_bars, print_summary
from dist_ckpt_strategies.cli.status import Status, status_of_issues
from dist_ckpt_strategies.cli.tool_ranks import WatchOf, reports, run_tool
from dist_ckpt_strategies.comm.shared_work import Ranks
from dist_ckpt_strategies.formats.commit import complete_commit
from dist_ckpt_strategies.formats.issues import Issue, Scan, Watch
from dist_ckpt_strategies.formats.scan import scan, verify
from dist_ckpt_strategies.local.scan import LocalScan, scan_local, verify_local
from dist_ckpt_strategies.storage.urls import StoreUrl, parsed_address

if TYPE_CHECKING:  # torch takes a while to import
    from dist_ckpt_strategies.comm.base import Communicator


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


def verify_checkpoint(address: str, *, nproc: int | None, as_json: bool) -> Status:
    """Check a checkpoint and show what is wrong with it; returns the exit status.

    Args:
        address: directory or URL of the checkpoint, or a directory of local ones.
        nproc: processes of this node that share the work; see ``run_tool``.
        as_json: print one JSON object.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
    """
    began = time.monotonic()
    with open_bars() as open_bar:
        found, issues = run_tool("verify", {"address": address}, nproc, open_bar)
    seconds = time.monotonic() - began
    view: Any = local if isinstance(found, LocalScan) else formats
    if reports(nproc):
        summary = view.verification_of(found, issues, seconds)
        print_summary("verify", summary, as_json=as_json)
    return status_of_issues(issues)


def verified(
    address: str, *, comm: Communicator | None, watch_of: WatchOf
) -> tuple[Scan | LocalScan, tuple[Issue, ...]]:
    """A checkpoint, and all that is wrong with it. Collective if ``comm`` has several ranks."""
    place, ranks = parsed_address(address, what="DIR"), Ranks(comm)
    if isinstance(place, Path):
        ranks.run_on_first(lambda: place.is_dir() and complete_commit(place))
    found = ranks.run(lambda: _scanned(place, watch_of("reading directories")))
    watch = watch_of("reading files")
    if isinstance(found, LocalScan):
        return found, verify_local(found, watch, comm=comm)
    return found, verify(found, watch, comm=comm)


def _scanned(place: Path | StoreUrl, watch: Watch | None) -> Scan | LocalScan:
    if isinstance(place, StoreUrl):
        # TensorStore takes a while to import, and directories go without.
        from dist_ckpt_strategies.formats.locations import located  # noqa: PLC0415

        return scan(located(str(place), None))
    return scan_local(place) or scan(place, watch)
