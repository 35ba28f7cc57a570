"""Partial Reduce without MPI: its filter, and its ranks in every order."""

import math
import random

import numpy as np
import pytest
from formed_groups import replay
from ready_groups import (
    Controller,
    Logged,
    ReadyWorld,
    components,
    controllers,
    everybody_is_linked,
    expected_group,
    settings,
    source,
    variant,
)

from collectives.topology import averaging_matrix, rho

# The controller


def test_a_history_is_long_enough_to_connect_all_ranks():
    shortest, default = controllers.shortest_history, controllers.default_history
    assert [shortest(*job) for job in ((8, 3), (4, 2), (8, 8), (9, 3), (2, 2), (1, 1))] == [
        *(4, 3, 1, 4, 1, 0)
    ]
    assert default(8, 3) == math.ceil(8 / 3 * (math.log(8) + 3)) == 14
    assert default(8, 8) == 6 and default(2, 2) == 4 and default(1, 1) >= 1


def groups_of(controller, events):
    """Return the groups that ready signals and pauses lead to: −1 − r means that r leaves."""
    formed = []
    for event in events:
        if event >= 0:
            controller.signal(event, 0, 0, False)
        elif controller.withdraw(-1 - event, 0, 1, True):
            formed.append((-1 - event,))
        while controller.form():
            formed.append(controller.group.listed()[0])
    return formed


def test_four_workers_do_not_freeze_into_two_pairs():
    """Each worker is ready again after the one that it averages with."""
    free = Controller(4, *settings(2, 10**4))
    filtered = Controller(4, *settings(2, 3))
    arrivals = [0, 1, 2, 3] * 30
    frozen = set(groups_of(free, arrivals))
    assert frozen == {(0, 1), (2, 3)}
    assert rho(averaging_matrix(frozen, 4)) == pytest.approx(1)
    formed = pair_up(filtered, 200)
    assert all(len(components(formed[i : i + 6])) == 1 for i in range(len(formed) - 6))
    assert rho(averaging_matrix(formed, 4)) < 0.9
    assert filtered.bridges + filtered.holds > 10


def pair_up(controller, count):
    """Let the members of each group be ready again together, whoever has waited longest first."""
    formed, left = [], [0, 1, 2, 3]
    while len(formed) < count:
        assert left, "workers wait for ever"
        now, left = left, []
        for rank in now:
            for group in groups_of(controller, [rank]):
                formed.append(group)
                left += group
    return formed


def test_nothing_is_held_before_the_history_is_full_or_for_a_worker_in_no_group_of_it():
    controller = Controller(5, *settings(2, 3))
    # Worker 4 is slow, and 0 to 3 are one component.
    assert groups_of(controller, [0, 1, 2, 3, 0, 1]) == [(0, 1), (2, 3), (0, 1)]
    # Frozen now: the one of 0 and 1 waits for 2 or 3.
    assert groups_of(controller, [0, 1]) == []
    assert controller.held
    assert [controller.holds_for(rank) for rank in range(5)] == [0, 0, 1, 1, 0]
    assert groups_of(controller, [3]) == [(0, 3)]
    assert groups_of(controller, [2]) == [(1, 2)]
    assert not controller.held
    # All four have met: 4 is in no group, and nobody waits for it.
    assert groups_of(controller, [0, 3]) == [(0, 3)]
    assert (controller.bridges, controller.holds) == (1, 1)


def test_a_group_waits_no_longer_once_those_of_the_other_component_have_left():
    controller = Controller(5, *settings(2, 2))
    assert groups_of(controller, [0, 1, 2, 3, 0, 1]) == [(0, 1), (2, 3)]
    assert groups_of(controller, [-1 - 2]) == [(0, 1)]
    assert not controller.held


@pytest.mark.parametrize("seed", range(60))
def test_the_filter_is_as_sets_and_lists_say_it(seed):
    check_controller(Controller, seed)


def check_controller(kind, seed, steps=300):
    draws = random.Random(seed)
    size = draws.randint(1, 9)
    group_size = draws.choice((2, 2, 3, draws.randint(2, max(size, 2))))
    history = max(1, controllers.shortest_history(size, group_size)) + draws.choice((0, 0, 1, 5))
    controller = kind(size, *settings(group_size, history))
    speeds = [draws.choice((1, 1, 5, 0.1)) for _ in range(size)]
    # Often those of a clan are ready together.
    clans, loyalty = [draws.randrange(2) for _ in range(size)], draws.choice((0, 0.9, 1))
    clan = 0
    queue, groups, ranks = [], [], set(range(size))
    pauses, away, left = 0, set(), set()
    computing = set(ranks)
    for _ in range(steps):
        able = sorted(computing - away - left)
        if draws.random() < loyalty:
            able = [rank for rank in able if clans[rank] == clan] or able
        if able and draws.random() < 0.99:
            (rank,) = draws.choices(able, [speeds[rank] for rank in able])
            controller.signal(rank, 0, pauses, False)
            queue.append(rank)
            computing.remove(rank)
        else:
            rank = draws.choice(sorted(ranks))
            if rank in left or rank in away:
                continue
            leaves = draws.random() < 0.03
            alone = controller.withdraw(rank, 0, pauses + 1, leaves)
            assert alone == (rank in queue)
            (left if leaves else away).add(rank)
            if alone:
                queue.remove(rank)
                assert controller.group.listed() == ((rank,), (1.0,))
            computing.add(rank)
            if away | left == ranks:
                pauses, away = pauses + 1, set()
        while True:
            there = ranks - away - left
            expected, awaited = expected_group(queue, there, groups, group_size, history)
            assert controller.form() == (expected is not None)
            assert controller.held == bool(awaited)
            assert {rank for rank in ranks if controller.holds_for(rank)} == awaited
            if expected is None:
                break
            assert controller.group.listed()[0] == tuple(sorted(expected))
            queue = [rank for rank in queue if rank not in expected]
            computing |= set(expected)
            clan = draws.randrange(2)
            if len(expected) > 1:
                groups.append(tuple(expected))
        assert controller.waiting == len(queue)
    assert controller.formed == len(groups)
    if groups:
        matrix = np.eye(size) + (
            np.array(controller.met).reshape(size, size) - np.diag(controller.taken)
        ) / len(groups)
        np.testing.assert_allclose(matrix, averaging_matrix(groups, size), atol=1e-12)
    return controller.bridges, controller.holds


def test_the_reference_bridges_and_holds():
    counts = [check_controller(Controller, seed) for seed in range(30)]
    bridges, holds = map(sum, zip(*counts))
    assert bridges > 100 and holds > 100


# Its ranks, in every order of a small case, and in orders that are drawn


PROGRAMS = {
    "one rank": (["cac"], 2, 1),
    "two ranks": (["cc", "cc"], 2, 1),
    "unequal numbers of calls": (["ccc", "c"], 2, 1),
    "an average": (["ca", "ac"], 2, 1),
    "an interrupted call": (["ci", "cc"], 2, 1),
    "three ranks": (["c", "c", "c"], 2, 2),
    "one of three leaves": (["c", "c", ""], 3, 1),
}


@pytest.mark.parametrize(("programs", "group_size", "history"), PROGRAMS.values(), ids=PROGRAMS)
def test_everybody_comes_to_an_end_in_every_order(programs, group_size, history):
    assert ReadyWorld(programs, settings(group_size, history)).explore() > 10


def draw_programs(draws, size, averages, meeting="a"):
    """Return programs with as many averages, and any numbers of calls before each."""
    parts = [["c" * draws.randint(0, 5) for _ in range(averages + 1)] for _ in range(size)]
    ends = [draws.choice(("", "", "i")) for _ in range(size)]
    return [meeting.join(part) + end for part, end in zip(parts, ends)]


def run_drawn(seed, kind=Logged, averages=2, **limits):
    """Let ranks with drawn programs and settings end in a drawn order; return their world.

    Where there are limits to how long calls wait, they also meet in barriers.
    """
    draws = random.Random(seed)
    size = draws.choice((1, 2, 3, 4, 5, 8))
    group_size = draws.randint(2, max(2, min(size, 4)))
    history = max(1, controllers.shortest_history(size, group_size)) + draws.choice((0, 0, 2))
    dynamic = draws.random() < 0.3
    world = ReadyWorld(
        draw_programs(draws, size, averages, "ba" if limits else "a"),
        settings(group_size, history, dynamic),
        controller_rank=draws.randrange(size),
        protocol=kind,
        **limits,
    )
    world.run(seed)
    return world


@pytest.mark.parametrize("seed", range(150))
def test_nobody_waits_for_ever_and_each_call_is_in_one_group(seed):
    run_drawn(seed)


BARRIERS = {
    "one is left over": (["cb", "cb", "cb"], 2, 2),
    "one makes none before": (["cbc", "bc"], 2, 1),
    "and an average": (["cba", "bac"], 2, 1),
}


@pytest.mark.parametrize(("programs", "group_size", "history"), BARRIERS.values(), ids=BARRIERS)
def test_nobody_waits_for_one_that_waits_elsewhere_in_every_order(programs, group_size, history):
    """Without limits to how long a call waits, some order ends with ranks that wait for others."""
    given = settings(group_size, history)
    assert ReadyWorld(programs, given, overdue=4).explore() > 10
    with pytest.raises(AssertionError, match="a rank waits for ever"):
        ReadyWorld(programs, given).explore()


@pytest.mark.parametrize("spurious", [0, 5])
def test_nobody_waits_for_one_that_waits_elsewhere(spurious):
    worlds = [run_drawn(seed, spurious=spurious, overdue=200) for seed in range(100)]
    assert sum(world.controlling.controller.released > 0 for world in worlds) > 50
    assert all(world.overdue > 0 for world in worlds)


def change(rank, call):
    """What a rank's application changes before a call; before the first, what it begins with."""
    return np.random.default_rng([rank, call + 1]).standard_normal(3)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_the_vectors_are_the_means_of_the_groups(seed, dynamic):
    draws = random.Random(seed)
    size = draws.choice((2, 3, 5, 8))
    group_size = draws.randint(2, min(size, 4))
    history = controllers.shortest_history(size, group_size)
    programs = ["c" * draws.randint(1, 9) for _ in range(size)]
    world = ReadyWorld(programs, settings(group_size, history, dynamic), change)
    world.run(seed)
    formed = world.controlling.formed
    start = np.array([change(rank, -1) for rank in range(size)])
    expected = replay(formed, [protocol.log for protocol in world.protocols], start, change)
    ended = [port.vector for port in world.ports]
    np.testing.assert_allclose(ended, expected, rtol=1e-12, atol=1e-12)
    assert dynamic == any(weight < 1 for _, _, weights in formed for weight in weights)


def test_groups_have_as_many_members_as_are_wanted_while_enough_ranks_are_there():
    """All make equally many calls, so fewer are left only at the end."""
    sizes = []
    for seed in range(30):
        world = ReadyWorld(["c" * 10] * 6, settings(3, 10))
        world.run(seed)
        sizes.append([len(members) for _, members, _ in world.controlling.formed])
        assert world.controlling.controller.alone == sizes[-1].count(1)
    assert all(set(each[:10]) == {3} for each in sizes)
    assert any(set(each) > {3} for each in sizes)


def test_whom_a_call_waits_for():
    world = ReadyWorld(["c", "c", "c", "c", "c"], settings(2, 2), controller_rank=4)
    controller = world.controlling.controller
    assert groups_of(controller, [0, 1, 2, 3]) == [(0, 1), (2, 3)]

    def deliver():
        while any(world.channels.values()):
            for pair, channel in list(world.channels.items()):
                if channel:
                    world._deliver(pair)

    protocol = world.protocols[0]
    assert not any(protocol.waits_for(rank) for rank in range(5))
    world._act(0)
    deliver()
    assert [rank for rank in range(5) if protocol.waits_for(rank)] == [1, 2, 3, 4]
    world._act(1)
    deliver()
    for rank, waiting in enumerate(world.protocols[:2]):
        assert [other for other in range(5) if waiting.waits_for(other)] == [2, 3], rank
    # Who leaves is waited for by nobody any more.
    world.ports[2].program.clear()
    world._act(2)
    deliver()
    assert not any(protocol.waits_for(rank) for rank in range(5))
    assert world.controlling.formed[-1][1] == (0, 1)


def test_after_an_average_that_all_go_on_from_all_models_are_as_new():
    controller = Controller(2, *settings(2, 1, dynamic=True))
    for rank, iteration in enumerate((9, 2)):
        assert not controller.withdraw(rank, iteration, 1, False)
    for rank, iteration in enumerate((10, 3)):
        controller.signal(rank, iteration, 1, True)
    assert controller.form()
    assert controller.newest == 10
    assert controller.group.listed() == ((0, 1), (0.5, 0.5))


# Wrong variants


def never_chooses(self, count):
    self.dropped = self.added = count - 1
    return True


def acts_at_once(self, count):
    formed, self.formed = self.formed, self.formed + self.history
    chosen = Controller.choose(self, count)
    self.formed = formed
    return chosen


def the_newest_first(self, rank, iteration, pauses, fresh):
    Controller.signal(self, rank, iteration, pauses, fresh)
    self.queue[: self.waiting] = source.array.array("i", [rank, *self.queue[: self.waiting - 1]])


def all_are_there(self, rank):
    return not self.left[rank]


WRONG_CONTROLLERS = {
    "without a filter": {"choose": never_chooses},
    "one that acts before the history is full": {"choose": acts_at_once},
    "one that holds groups for workers in none": {"is_frozen": everybody_is_linked},
    "not in the order of the signals": {"signal": the_newest_first},
    "one that waits for ranks that pause": {"is_there": all_are_there},
}


@pytest.mark.parametrize("methods", WRONG_CONTROLLERS.values(), ids=WRONG_CONTROLLERS)
def test_a_wrong_controller_is_caught(methods):
    with pytest.raises(AssertionError):
        for seed in range(60):
            check_controller(variant(**methods), seed)


class Unanswered(Logged):
    """Forgets that a rank that leaves may be ready."""

    def control(self, source_rank, kind, iteration, pauses, fresh):
        if kind == source.LEAVE:
            self.controller.ready[source_rank] = False
        super().control(source_rank, kind, iteration, pauses, fresh)


class Aging(Logged):
    """Does not take over the newest member's iteration."""

    def arrived(self, source_rank, integers):
        iteration = self.iteration
        super().arrived(source_rank, integers)
        self.iteration = iteration


class Silent(Logged):
    """Pauses without a word."""

    def pause(self):
        self.pauses += 1


class Twice(Logged):
    """Sends a ready signal again, as if the first could be lost."""

    def call(self):
        super().call()
        if self.calls == 1:
            self.tell(source.READY)


@pytest.mark.parametrize("wrong", [Unanswered, Aging, Silent, Twice])
def test_a_wrong_protocol_is_caught(wrong):
    with pytest.raises((AssertionError, ValueError)):
        for seed in range(300):
            run_drawn(seed, wrong)


class Port:
    """Where messages go that nobody answers."""

    def send(self, destination, integers):
        pass

    def reduce(self, group):
        pass

    def return_model(self):
        pass


def test_a_call_between_averages_has_no_share_of_the_initial_model():
    rank = source.ReadyGroupProtocol(Port(), 1, 3, 0, None)
    rank.sync_every = 2
    shares = []
    for _ in range(4):
        rank.call()
        if rank.averages():
            group = source.Group(rank.calls, (0, 1))
            message = source.array.array("q", [source.GROUP, 9, 2**52] + 5 * [0])
            rank.arrived(0, message[: group.write(message, 3)])
        shares.append(rank.initial_share)
        rank.returned()
    assert shares == [0, 0.5, 0, 0.5]
    assert rank.initial_total == 1
