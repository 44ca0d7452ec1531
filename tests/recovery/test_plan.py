"""Who keeps, who finishes, who receives from whom: all cases of a small world, and properties."""

import itertools
import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.errors import NoReplicasAvailableError
from dist_ckpt_strategies.recovery.plan import (
    HeldState,
    Phase,
    RankInput,
    RecoveryPlan,
    Role,
    ShardInfo,
    build_recovery_plan,
    evenly_spaced,
)

STEP = 5
SIZE = 4
WEIGHTS = ShardInfo("weights", 100_000, "w")


def shards_of(rank: int, num_shards: int = 2) -> tuple[ShardInfo, ...]:
    shard = rank % num_shards
    return (ShardInfo(f"shard/{shard}", 30_000, f"s{shard}"), WEIGHTS)


def inputs_of(
    states: Sequence[tuple[int, Phase] | None], num_shards: int = 2
) -> tuple[RankInput, ...]:
    """Ranks at a step and phase, or without state; everybody knows all random states."""
    known = tuple((step, range(len(states))) for step in range(STEP - 1, STEP + 3))
    return tuple(
        RankInput(
            shards_of(rank, num_shards),
            ("weights",),
            None if state is None else HeldState(*state, shards_of(rank, num_shards)),
            "died",
            () if state is None else known,
        )
        for rank, state in enumerate(states)
    )


def require_sound(inputs: Sequence[RankInput], plan: RecoveryPlan) -> None:
    """What holds of every plan."""
    held = [one.held for one in inputs]
    counts = [s.step + 1 for s in held if s is not None and s.phase >= Phase.COMMITTED]
    begun = [s.step for s in held if s is not None]
    assert plan.target == max([*counts, *begun])
    for rank, (state, role) in enumerate(zip(held, plan.roles, strict=True)):
        if role is Role.FINISH_STEP:  # once, from gradients that are final
            assert state is not None
            assert state.step == plan.target - 1
            assert state.phase in {Phase.GRADS_FINAL, Phase.COMMITTED}
        if role is Role.KEEP:  # the update is there already, or the step does not count
            assert state is not None
            is_updated = state.phase is Phase.UPDATED and state.step == plan.target - 1
            is_before = state.phase <= Phase.GRADS_FINAL and state.step == plan.target
            assert is_updated or is_before
        require_whole(inputs[rank], rank, plan)
    if not plan.needs_gather:  # the weights are those of the target where the step has ended
        holders = [state for r, state in enumerate(held) if "weights" in plan.local_shards(r)]
        assert all(state is not None and state.step == plan.target for state in holders)
    for copy in plan.copies:
        assert plan.roles[copy.source] is not Role.RECEIVE
    for source in (*plan.object_sources, *plan.random_sources):
        assert held[source] is not None


def require_whole(one: RankInput, rank: int, plan: RecoveryPlan) -> None:
    """Every byte of every part comes from one place: kept, gathered, or one sender."""
    for shard in one.wanted:
        copies = [c for c in plan.copies if (c.receiver, c.shard_id) == (rank, shard.shard_id)]
        is_gathered = plan.needs_gather and shard.shard_id in one.gathered
        is_kept = shard.shard_id in plan.local_shards(rank)
        assert is_gathered + is_kept + bool(copies) == 1 or not shard.nbytes
        assert [copy.nbytes for copy in copies] in ([], [shard.nbytes])


FINISHABLE = {Phase.GRADS_FINAL, Phase.COMMITTED, Phase.UPDATED}


def is_covered(inputs: Sequence[RankInput], target: int) -> bool:
    """Whether every shard has a holder that is, or can get, to the target."""
    covered = {
        shard.shard_id
        for state in [one.held for one in inputs if one.held is not None]
        for shard in state.shards
        if state.step == target or (state.step == target - 1 and state.phase in FINISHABLE)
    }
    return covered >= {shard.shard_id for one in inputs for shard in one.wanted}


def has_plan(states: Sequence[tuple[int, Phase] | None], num_shards: int = 2) -> bool:
    """Whether ranks can go on; the plan is sound then, and else the reason names ranks."""
    inputs = inputs_of(states, num_shards)
    alive = [state for state in states if state is not None]
    target = max((s + (p >= Phase.COMMITTED) for s, p in alive), default=-1)
    if not (alive and is_covered(inputs, target)):
        with pytest.raises(NoReplicasAvailableError, match="rank"):
            build_recovery_plan(inputs)
        return False
    plan = build_recovery_plan(inputs)
    require_sound(inputs, plan)
    assert build_recovery_plan(list(inputs)) == plan
    return True


ONE_STEP = [None, *((STEP, phase) for phase in Phase), (STEP + 1, Phase.RUNNING)]


def test_every_combination_of_phases_and_losses_has_a_sound_plan_or_a_reason() -> None:
    found = [has_plan(states) for states in itertools.product(ONE_STEP, repeat=SIZE)]
    assert sum(found) > len(found) // 3


@given(
    st.lists(
        st.one_of(st.none(), st.tuples(st.integers(STEP - 1, STEP + 1), st.sampled_from(Phase))),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 4),
)
def test_plans_of_any_world_are_sound_or_say_who_is_missing(
    states: list[tuple[int, Phase] | None], num_shards: int
) -> None:
    has_plan(states, num_shards)


COMMITTED, INCONSISTENT = (STEP, Phase.COMMITTED), (STEP, Phase.UPDATING)
WITHOUT_RANDOM_STATES = [
    replace(one, random_states=((STEP, range(1)),))
    for one in inputs_of([(STEP, Phase.RUNNING), None], num_shards=1)
]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (
            inputs_of([COMMITTED, None, COMMITTED, INCONSISTENT]),
            r"shard/1: no rank holds it at step 6.*rank 1: died; rank 3: was interrupted",
        ),
        (inputs_of([None, None]), "ranks 0, 1: died"),
        (WITHOUT_RANDOM_STATES, f"random states of rank 1 .* {STEP}"),
    ],
)
def test_a_part_that_no_rank_has_is_named_with_the_ranks_that_had_it(
    inputs: Sequence[RankInput], words: str
) -> None:
    with pytest.raises(NoReplicasAvailableError, match=words):
        build_recovery_plan(inputs)


def test_ranks_keep_their_own_random_states_and_others_ask_the_first_that_has_them() -> None:
    inputs = inputs_of([(STEP, Phase.RUNNING), None, (STEP, Phase.RUNNING), (STEP, Phase.RUNNING)])
    own = replace(inputs[0], random_states=((STEP, range(1)), (STEP - 1, range(1, 2))))
    last = replace(inputs[3], random_states=((STEP, range(3, 4)),))

    plan = build_recovery_plan([own, *inputs[1:3], last])

    assert plan.random_sources == (0, 2, 2, 3)


def test_objects_come_from_the_first_of_those_that_share_most_parts() -> None:
    inputs = list(inputs_of([(STEP, Phase.RUNNING)] * 5, num_shards=2))
    inputs[3] = replace(inputs[3], held=None)
    inputs[4] = replace(inputs[4], held=None, wanted=(ShardInfo("weights", 100_000, "w"),))

    assert build_recovery_plan(inputs).object_sources == (0, 1, 2, 1, 0)


def test_plan_inputs_do_not_grow_with_the_world_and_each_receiver_has_a_source_of_its_own() -> None:
    """As with plain data parallelism: all ranks hold the same, and replicate to all."""
    assert evenly_spaced(range(3, 16_384, 8)) == (range(3, 16_384, 8),)
    sizes = []
    for size in (64, 1024):
        (everyone,) = evenly_spaced(range(size))
        known = tuple((step, everyone) for step in (STEP, STEP + 1))
        held = HeldState(STEP, Phase.RUNNING, (WEIGHTS,))
        one = RankInput((WEIGHTS,), (), held, "", known)
        inputs = [one] * (size - 2) + [replace(one, held=None, random_states=())] * 2
        sizes.append(len(pickle.dumps(one)))
        plan = build_recovery_plan(inputs)
        for receiver in (size - 2, size - 1):
            require_whole(inputs[receiver], receiver, plan)
        assert len({copy.source for copy in plan.copies}) == len(plan.copies) == 2
    assert sizes[1] <= sizes[0] + 2
