"""What members of a clique send each other stays within its bounds."""

from __future__ import annotations

import pytest

from dist_ckpt_strategies.core.messages import MESSAGE_NBYTES
from dist_ckpt_strategies.local.plan import build_replication_plan

MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_members", "bucket", "expected"),
    [
        (2, 64 * MIB, MESSAGE_NBYTES),
        (2, MIB, MIB),
        (5, 64 * MIB, MESSAGE_NBYTES),
        (5, 4 * MIB, MIB),
    ],
)
def test_what_a_member_receives_in_a_round_fits_into_a_bucket(
    num_members: int, bucket: int, expected: int
) -> None:
    plan = build_replication_plan([[4096]] * num_members, [[100 * MIB]] * num_members, bucket)

    sizes = [message.nbytes for messages in plan.messages for message in messages]
    assert max(sizes) == expected
    assert expected * (num_members - 1) <= bucket
    assert sum(sizes) == num_members * 100 * MIB
