"""How the supervisor tells a worker its place in the job."""

from __future__ import annotations

import json
from dataclasses import asdict

from dist_ckpt_strategies.errors import PeerError
from dist_ckpt_strategies.inprocess.coordinator import RankInfo


def assignment_key(worker: str) -> str:
    """Where the supervisor writes the place of a worker."""
    return f"assign/{worker}"


def ready_key(worker: str) -> str:
    """Where a worker writes that it waits for a place, or has asked for the one it has."""
    return f"ready/{worker}"


def rank_info_to_text(place: RankInfo) -> str:
    """What the supervisor writes there."""
    return json.dumps(asdict(place))


def rank_info_from_text(text: str) -> RankInfo:
    """What a worker reads there.

    Raises:
        PeerError: it is no place.
    """
    try:
        found = json.loads(text)
        environment = tuple((str(name), str(value)) for name, value in found.pop("environment"))
        numbers = {name: int(value) for name, value in found.items()}
        return RankInfo(**numbers, environment=environment)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PeerError(None, f"expected a place in the job, found {text[:200]!r}") from error


def environment_of(place: RankInfo) -> dict[str, str]:
    """The variables of a place, as torchrun names them."""
    return {
        "RANK": str(place.global_rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        **dict(place.environment),
    }
