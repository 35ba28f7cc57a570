"""The wait-avoiding protocol keeps its invariants in every interleaving that is tried.

The invariants themselves are in `protocol_network`, which checks them throughout every run.
"""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_messages import all_ranks, own_pace, protocols
from protocol_network import (
    ListedChooser,
    RandomChooser,
    Stage,
    World,
    run_seed,
)
from protocol_scenarios import (
    AT_ONCE,
    AVERAGE,
    CALL,
    CLOSE,
    DELAYED,
    INTERRUPTED_CALL,
    JOIN,
    ONE_AT_A_TIME,
    PUBLISH,
    SYNCHRONIZE,
    Load,
    Scenario,
    random_drawn_scenario,
    random_nonfinite_scenario,
    random_own_pace_scenario,
    random_partial_scenario,
    random_weighted_scenario,
)

from collectives.protocols import wait_avoiding

SEEDS_PER_BLOCK = 150
BLOCKS = [0, *(pytest.param(n, marks=pytest.mark.extra) for n in (1, 2))]

# What random runs meet.
EVERYTHING = {
    "timely",
    "late",
    "passive",
    "together",
    "stopped",
    "never arrived",
    "closed early",
    "interrupted",
    "disagreement",
    "synchronization",
    "overtaken activation",
    "joined",
    "draining",
    "finish",
    "load",
    "notice",
}


@pytest.mark.parametrize("block", BLOCKS)
def test_random_runs_keep_every_invariant(block):
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        run_seed(seed)


@pytest.mark.slow
def test_random_runs_of_drawn_starts_keep_every_invariant():
    """Each version is started by the rank that is drawn for it, unless one is in an operation."""
    seeds = range(SEEDS_PER_BLOCK)
    met = set().union(*(run_seed(seed, random_drawn_scenario).met for seed in seeds))
    assert {"timely", "late", "passive", "freed", "joined", "closed early"} < met


@pytest.mark.slow
def test_no_update_is_lost_where_vectors_have_weights_of_their_own_or_by_work():
    """The sum of all weighted snapshots changes by what is published alone, and never by a mean."""
    met = set().union(*(run_seed(seed, random_weighted_scenario).met for seed in range(200)))
    assert {"timely", "late", "passive", "synchronization", "closed early"} < met


@pytest.mark.parametrize(
    "block",
    [
        0,
        *(pytest.param(n, marks=[pytest.mark.extra, pytest.mark.long]) for n in (1, 2)),
    ],
)
def test_random_runs_at_the_own_pace_of_up_to_16_ranks_keep_every_invariant(block):
    """They meet all that can happen, in any number of calls."""
    count = 100 if block == 0 else 1000
    seeds = range(block * count, (block + 1) * count)
    met = set().union(*(run_seed(seed, random_own_pace_scenario).met for seed in seeds))
    assert met >= EVERYTHING | {"not finite", "expired"}


def test_random_runs_with_arrays_that_versions_leave_out_keep_every_invariant():
    met = set().union(*(run_seed(seed, random_partial_scenario).met for seed in range(150)))
    assert met >= {"timely", "late", "passive", "synchronization", "joined", "load"}


def test_random_runs_with_interrupted_calls_that_contribute_nothing_keep_every_invariant():
    met = set().union(*(run_seed(seed, random_nonfinite_scenario).met for seed in range(150)))
    assert met >= {"timely", "interrupted", "not finite"}


def test_at_the_own_pace_engines_are_a_period_apart_and_two_while_ranks_load():
    """Nobody hears anything on rank 1 as long as the others can go on."""
    program = (*[CALL] * 5, Load(0), *[CALL] * 6, CLOSE)
    scenario = Scenario(2, 1, 3, (program, (Load(0), CLOSE)), conserving=True, own_pace=True)
    world, apart = World(scenario), {False: 0, True: 0}

    def choose(events):
        versions = [rank.protocol.next for rank in world.ranks]
        loading = any(rank.protocol.operation == all_ranks.LOAD for rank in world.ranks)
        apart[loading] = max(apart[loading], versions[0] - versions[1])
        exchanges = [event for event in events if event[:2] in ((1, "hear"), (1, "receive"))]
        return next((event for event in events if event not in exchanges), events[0])

    world.run(choose)
    assert apart == {False: 3, True: 5}


@pytest.mark.parametrize("seed", (0, 1, 2**64 - 1))
@pytest.mark.parametrize("size", (3, 8))
def test_ranks_are_drawn_uniformly(size, seed):
    """The counts, and those of pairs in sequence, are within five standard deviations."""
    drawn = [protocols.drawn(seed, version, size) for version in range(8000)]
    for count in Counter(drawn).values():
        assert abs(count - 8000 / size) < 5 * (8000 / size) ** 0.5
    pairs = Counter(itertools.pairwise(drawn))
    assert len(pairs) == size**2
    for count in pairs.values():
        assert abs(count - 8000 / size**2) < 5 * (8000 / size**2) ** 0.5


def test_the_compiled_protocol_draws_the_same():
    for seed in (0, 7, 2**64 - 1):
        for version in (0, 1, 10**6, 2**60):
            expected = protocols.drawn(seed, version, 7)
            assert wait_avoiding.drawn(seed, version, 7) == expected


@pytest.mark.slow
def test_random_runs_meet_all_that_can_happen():
    met = set().union(*(run_seed(seed).met for seed in range(60)))
    assert met == EVERYTHING


OPERATIONS = st.sampled_from(
    (CALL, CALL, CALL, INTERRUPTED_CALL, PUBLISH, AVERAGE, SYNCHRONIZE, JOIN, Load(0), Load(5))
)


@st.composite
def scenarios(draw):
    world_size = draw(st.integers(1, 5))
    epochs = draw(st.lists(st.lists(OPERATIONS, max_size=6), min_size=1, max_size=2))
    joining = draw(st.booleans())
    programs = []
    for _ in range(world_size):
        program = []
        for epoch in epochs:
            program += epoch[: draw(st.just(len(epoch)) | st.integers(0, len(epoch)))]
            program += [JOIN] * joining
        program += draw(st.just([]) | st.lists(OPERATIONS, max_size=2))
        programs.append((*program, CLOSE))
    return Scenario(
        world_size,
        group_size=draw(st.integers(1, world_size)),
        sync_period=draw(st.sampled_from((1, 2, 3, 100))),
        programs=tuple(programs),
        passive=draw(st.booleans()),
        conserving=draw(st.booleans()),
        sends=draw(st.sampled_from((AT_ONCE, DELAYED, ONE_AT_A_TIME))),
        frozen=draw(st.frozensets(st.integers(0, world_size - 1))),
        frozen_from=draw(st.integers(0, 60)),
        failing=draw(st.frozensets(st.integers(0, world_size - 1))),
        heeds=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(scenarios(), st.lists(st.integers(0, 40), min_size=80, max_size=300))
def test_chosen_runs_keep_every_invariant(scenario, choices):
    World(scenario).run(ListedChooser(choices))


def test_a_call_that_is_interrupted_with_its_mean_there_goes_on_from_that():
    program = (PUBLISH, SYNCHRONIZE, Load(0), INTERRUPTED_CALL, INTERRUPTED_CALL, CALL, CLOSE)
    scenario = Scenario(
        2,
        group_size=2,
        sync_period=100,
        programs=(program, program),
        conserving=True,
        sends=DELAYED,
        frozen=frozenset({0, 1}),
        frozen_from=34,
    )
    world = World(scenario)
    world.run(ListedChooser([*28 * [0], 1, 16, 17, 31, 35, 0, 0, 0, 1, 1, *42 * [0]]))
    assert "interrupted" in world.met


@pytest.mark.parametrize("world_size", range(2, 10))
def test_a_call_returns_while_all_other_applications_stop(world_size):
    scenario = Scenario(
        world_size,
        group_size=world_size,
        sync_period=100,
        programs=((*[CALL] * 3, CLOSE),) * world_size,
        frozen=frozenset(range(1, world_size)),
    )
    world = World(scenario)
    choose = RandomChooser(random.Random(world_size), world_size)
    world.freeze(scenario.frozen)
    while events := world.events():
        world.happen(choose(events))
    assert world.ranks[0].protocol.version == 3
    assert [rank.executed for rank in world.ranks] == [[0, 1, 2]] * world_size
    assert all(rank.application.stage == Stage.COMPUTING for rank in world.ranks[1:])


@pytest.mark.parametrize("sync_period", (1, 2, 3))
def test_all_ranks_have_the_same_model_after_a_synchronization(sync_period):
    programs = ((*[CALL] * sync_period, CLOSE),) * 5
    world = World(Scenario(5, 2, sync_period, programs))
    choose = RandomChooser(random.Random(sync_period), 5)
    models = {}

    def watch(event, world):
        for rank in world.ranks:
            if rank.epoch == 1 and rank.application.stage == Stage.COMPUTING:
                models[rank.number] = rank.model

    world.run(choose, watch)
    assert len(models) == 5
    assert len(set(models.values())) == 1


def test_ranks_that_join_early_end_with_the_version_and_the_model_of_the_others():
    epochs = [(*[CALL] * calls, JOIN) for calls in (7, 2, 0, 5, 4)]
    world = World(Scenario(5, 2, 4, tuple((*epoch, CALL, CLOSE) for epoch in epochs)))
    choose = RandomChooser(random.Random(7), 5)
    finished = {}

    def watch(event, world):
        for rank in world.ranks:
            if rank.epoch == 2 and rank.application.stage == Stage.COMPUTING:
                finished.setdefault(rank.number, (rank.protocol.version, rank.model))

    world.run(choose, watch)
    assert len(finished) == 5
    assert len(set(finished.values())) == 1
    assert finished[2][0] == 7


def protocol_of(dimensions=3, group_size=2, sync_period=100, passive=True):
    return protocols.WaitAvoidingProtocol(dimensions, group_size, sync_period, passive)


def test_an_activation_is_forwarded_on_higher_dimensions_alone():
    protocol = protocol_of(dimensions=4)
    protocol.activate(0, 0, 1)
    assert protocol.due == 0b1100
    assert (protocol.vectors, protocol.running) == (protocols.RUNNING, 0)


def test_a_known_version_is_forwarded_where_it_has_not_been_sent():
    protocol = protocol_of(dimensions=4)
    protocol.activate(0, 0, 2)
    assert protocol.due == 0b1000
    protocol.due = 0
    protocol.activate(0, 0, 0)
    assert protocol.due == 0b0110


def test_a_later_activation_overtakes_one_that_is_due():
    protocol = protocol_of()
    protocol.activate(0, 0, 0)
    protocol.activate(2, 1, 0)
    assert protocol.due == 0b110
    assert protocol.sent[1:3] == [2, 2]
    assert protocol.sent_ops[1:3] == [1, 1]


def test_a_group_of_one_announces_nothing():
    protocol = protocol_of(group_size=1)
    protocol.call()
    protocol.published()
    assert protocol.due == 0
    assert (protocol.vectors, protocol.running) == (protocols.RUNNING, 0)


def test_a_version_waits_for_the_operations_that_came_before_it():
    protocol = protocol_of()
    protocol.enter(all_ranks.AVERAGE)
    protocol.activate(0, 1, 0)
    assert protocol.due == 0b110
    assert protocol.vectors == protocols.IDLE
    protocol.agreed([all_ranks.AVERAGE, 0] * 5, 5)
    assert protocol.vectors == protocols.HELD
    protocol.reduced()
    assert (protocol.vectors, protocol.running) == (protocols.RUNNING, 0)


def test_nothing_is_forwarded_once_all_ranks_close():
    protocol = protocol_of()
    protocol.enter(CLOSE)
    protocol.agreed([CLOSE, 2, CLOSE, 0], 2)
    assert (protocol.fin_due, protocol.running) == (0b111, 0)
    protocol.activate(1, 0, 0)
    assert protocol.due == 0


def test_a_rank_that_has_joined_executes_what_it_missed_before_it_moves():
    protocol = protocol_of()
    protocol.enter(JOIN)
    protocol.agreed([JOIN, 0, AVERAGE, 2], 2)
    assert (protocol.stage, protocol.running, protocol.version) == (all_ranks.DRAINING, 0, 2)
    protocol.finished()
    assert (protocol.stage, protocol.running) == (all_ranks.DRAINING, 1)
    protocol.finished()
    assert (protocol.stage, protocol.vectors) == (all_ranks.REDUCING, protocols.HELD)
    protocol.reduced()
    assert (protocol.operation, protocol.stage, protocol.ops) == (JOIN, all_ranks.AGREEING, 1)


@pytest.mark.parametrize(
    "joined_at, operation, t",
    ((3, CLOSE, 3), (3, all_ranks.LOAD, 3), (-1, all_ranks.LOAD, 3), (3, AVERAGE, 2)),
)
def test_a_rank_that_has_joined_does_not_agree_with(joined_at, operation, t):
    """Nobody else may close or load, nor average after fewer calls than it has made.

    The first rank's record says -1 where not all load the same version.
    """
    protocol = protocol_of()
    protocol.next = protocol.version = 3
    protocol.enter(JOIN)
    protocol.agreed([JOIN, joined_at, operation, t], 2)
    assert protocol.broken and not protocol.joined
    assert (protocol.operation, protocol.stage) == (all_ranks.NONE, all_ranks.OUTSIDE)


def test_a_notice_is_sent_once_on_each_dimension():
    protocol = protocol_of(dimensions=4)
    protocol.notice(5, 1)
    assert (protocol.failed, protocol.notice_due) == (5, 0b1100)
    protocol.notice_due = 0
    protocol.notice(6, -1)
    assert (protocol.failed, protocol.notice_due) == (5, 0b0011)


def test_a_load_renumbers_the_versions():
    protocol = protocol_of(sync_period=5)
    assert not protocol.is_synchronous()
    protocol.enter(all_ranks.LOAD)
    protocol.agreed([all_ranks.LOAD, 0] * 2, 2)
    assert protocol.stage == all_ranks.REDUCING
    protocol.base = 9
    protocol.reduced()
    assert (protocol.version, protocol.stage) == (0, all_ranks.OUTSIDE)
    assert protocol.is_synchronous()


def test_calls_and_versions_are_two_numbers():
    """A rank that has joined goes through the others' versions without calls of its own."""
    protocol = protocol_of(sync_period=3)
    protocol.call()
    protocol.published()
    protocol.finished()
    protocol.returns()
    assert (protocol.calls, protocol.version) == (1, 1)
    protocol.call()
    protocol.abandon()
    assert (protocol.calls, protocol.version) == (1, 2)
    protocol.finished()
    protocol.enter(all_ranks.JOIN)
    protocol.agreed([all_ranks.JOIN, 2, all_ranks.SYNC, 2], 2)
    protocol.reduced()
    assert (protocol.calls, protocol.version) == (1, 3)


def test_a_rank_at_its_own_pace_loads_after_what_came_before_though_others_go_on():
    """Those that have loaded may have started more, and nothing else keeps them."""
    protocol = own_pace.OwnPaceProtocol(3, 2, 100, True)
    protocol.enter(all_ranks.LOAD)
    protocol.agreed([all_ranks.LOAD, 0, all_ranks.LOAD, 2], 2)
    protocol.activate(2, 1, 0)
    protocol.finished()
    assert (protocol.vectors, protocol.running) == (protocols.RUNNING, 1)
    protocol.finished()
    assert (protocol.stage, protocol.vectors) == (all_ranks.REDUCING, protocols.HELD)
    protocol.reduced()
    assert (protocol.vectors, protocol.running) == (protocols.RUNNING, 2)


def test_calls_at_the_own_pace_and_versions_are_two_numbers():
    """An interrupted timely call counts as the start that it was, and a late one as nothing."""
    protocol = own_pace.OwnPaceProtocol(3, 2, 2, True)
    protocol.call()
    protocol.abandon()
    assert (protocol.calls, protocol.version, protocol.running) == (0, 1, 0)
    protocol.finished()
    protocol.activate(2, 0, 0)
    protocol.finished()
    protocol.call()
    assert (protocol.timely, protocol.waiting) == (False, True)
    protocol.abandon()
    assert (protocol.version, protocol.running, protocol.is_synchronous()) == (1, 2, False)
    protocol.finished()
    protocol.call()
    assert (protocol.timely, protocol.vectors) == (False, protocols.HELD)
    protocol.returns()
    assert (protocol.calls, protocol.version, protocol.started) == (1, 3, 2)
