"""Partial Reduce without MPI: its filter, and its ranks in every order."""

import math
import random

import numpy as np
import pytest
from formed_groups import replay
from ready_groups import (
    Controller,
    Expected,
    Logged,
    ReadyWorld,
    components,
    controllers,
    settings,
    source,
    variant,
)

from collectives.topology import averaging_matrix, rho
from wagma.simulation import MACHINES, Settings
from wagma.simulation.core import Simulation
from wagma.simulation.partial_reduce import partial_reduce

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
    for event in [*events, None]:
        if event is None:
            pass
        elif event >= 0:
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
    # Frozen now: the group of 0 and 1 waits for 2 or 3.
    assert groups_of(controller, [0, 1]) == []
    assert controller.held
    assert groups_of(controller, [3]) == [(0, 3)]
    assert groups_of(controller, [2]) == [(1, 2)]
    assert not controller.held
    # All four have met: 4 is in no group, and nobody waits for it.
    assert groups_of(controller, [0, 3]) == [(0, 3)]
    assert (controller.bridges, controller.holds) == (1, 1)


def test_workers_in_no_group_of_the_history_do_not_make_one_of_their_own():
    """They are slow: such groups would be as rare, and never be seen beside those of the others."""
    controller = Controller(4, *settings(2, 3))
    assert groups_of(controller, [0, 1] * 4) == [(0, 1)] * 4
    assert groups_of(controller, [2, 3]) == []
    assert groups_of(controller, [0, 1]) == [(0, 2), (1, 3)]


def test_a_group_waits_no_longer_once_those_of_the_other_component_have_left():
    controller = Controller(5, *settings(2, 2))
    assert groups_of(controller, [0, 1, 2, 3, 0, 1]) == [(0, 1), (2, 3)]
    assert groups_of(controller, [-1 - 2]) == [(0, 1)]
    assert not controller.held


def frozen_controller(second):
    """Return a controller that has formed (0, 1), (2, 3), (0, 1), of steps of 1 and `second` s."""
    controller = Controller(4, *settings(2, 3))
    for seconds, ranks in sorted([(1, (0, 1)), (second, (2, 3)), (2, (0, 1))]):
        controller.now = int(seconds * 1e9)
        groups_of(controller, ranks)
    return controller


def test_a_group_is_held_for_a_step_of_its_own_at_most_and_once_in_t_groups():
    controller = frozen_controller(1.4)
    controller.now = 3 * 10**9
    # 2 and 3 are expected since 2.8 s.
    assert groups_of(controller, [0, 1]) == [] and controller.held
    assert controller.due == 4 * 10**9
    controller.now = controller.due
    assert groups_of(controller, []) == [(0, 1)]
    assert controller.in_vain == 1
    assert groups_of(controller, [0, 1, 0, 1]) == [(0, 1)] * 2


def test_no_group_is_held_for_ranks_that_take_long_to_come():
    """Those are held for the others instead, which come soon."""
    controller = frozen_controller(1.8)
    controller.now = 3 * 10**9
    # 2 and 3 are expected at 3.6 s, in more than half a step.
    assert groups_of(controller, [0, 1]) == [(0, 1)]
    controller.now = int(3.6e9)
    assert groups_of(controller, [2, 3]) == [] and controller.held
    controller.now = int(4e9)
    assert groups_of(controller, [0, 1]) == [(0, 2), (1, 3)]


# Ranks, P', ranks that are slow, how many times, and σ of the log-normal steps.
SLOW_ALIKE = [
    *((4, 2, 2, 6, 0.02), (8, 2, 2, 6, 0.02), (4, 2, 2, 20, 0.02), (8, 2, 2, 1.87, 0.05)),
    *((4, 2, 2, 6, 0.001), (8, 2, 4, 6, 0.02), (8, 3, 3, 1.87, 0.05), (8, 4, 4, 2, 0.05)),
    (5, 3, 2, 6, 0.02),
]
MORE_ALIKE = [
    *((8, 3, 1, 6, 0.05), (8, 3, 3, 6, 0.05), (8, 3, 3, 3, 0.02), (8, 3, 3, 20, 0.02)),
    *((8, 2, 2, 20, 0.02), (8, 2, 2, 6, 0.1), (16, 2, 2, 6, 0.02), (8, 2, 4, 1.87, 0.05)),
    *((8, 2, 2, 3, 0.05), (4, 2, 2, 3, 0.05), (4, 2, 2, 2, 0.05), (8, 4, 4, 6, 0.05)),
    *((5, 2, 2, 6, 0.02), (5, 2, 3, 6, 0.02), (8, 2, 0, 1, 0.01), (16, 4, 4, 3, 0.05)),
]


@pytest.mark.parametrize(
    "case", SLOW_ALIKE + [pytest.param(case, marks=pytest.mark.extra) for case in MORE_ALIKE]
)
def test_the_filter_costs_two_percent_at_most_where_several_ranks_are_slow_alike(case):
    """And the groups connect all ranks, which without it they may not."""
    size, group_size, slow, factor, sigma = case
    steps = 0.1 * np.random.default_rng(1).lognormal(0, sigma, (800, size))
    steps[:, :slow] *= factor
    made, measured = {}, {}
    for history in (None, 10**6):
        method = partial_reduce(Settings(10**6, group_size=group_size, history=history), size)
        method.log = []
        simulation = Simulation(method, MACHINES["aries"], steps, 60)
        simulation.run()
        made[history] = simulation.made
        measured[history] = rho(averaging_matrix([g for g in method.log if len(g) > 1], size))
    assert made[None].sum() > 0.98 * made[10**6].sum()
    assert made[None][slow:].sum() > 0.98 * made[10**6][slow:].sum()
    assert measured[None] < 0.995
    assert sigma > 0.001 or measured[10**6] > 0.999


# Ranks whose next signal does not come


def test_a_rank_that_takes_much_longer_than_usual_is_waited_for_no_longer_until_it_signals():
    controller = Controller(3, *settings(3, 100))
    for step in range(1, 6):
        controller.now = step * 2 * 10**9
        assert groups_of(controller, [0, 1, 2]) == [(0, 1, 2)]
    controller.now += 10**9
    assert groups_of(controller, [0, 1]) == []
    # Eight steps of 2 s.
    assert controller.due == (10 + 16) * 10**9
    controller.now = controller.due
    assert groups_of(controller, []) == [(0, 1)]
    for _ in range(20):
        assert groups_of(controller, [0, 1]) == [(0, 1)]
    assert controller.absences == 1
    assert groups_of(controller, [2]) == []
    assert groups_of(controller, [0, 1]) == [(0, 1, 2)]
    assert groups_of(controller, [0, 1]) == []


def test_a_rank_that_begins_late_is_waited_for_as_if_it_were_the_slowest_of_the_others():
    controller = Controller(3, *settings(3, 100))
    controller.now = 100 * 10**9
    controller.restart_times()
    controller.now += 3 * 10**9
    assert groups_of(controller, [0]) == []
    controller.now += 2 * 10**9
    assert groups_of(controller, [1]) == []
    assert controller.due == (100 + 8 * 5) * 10**9
    controller.now = controller.due
    assert groups_of(controller, []) == [(0, 1)]
    assert groups_of(controller, [2]) == []
    assert groups_of(controller, [1]) == []
    assert groups_of(controller, [0]) == [(0, 1, 2)]


def test_a_rank_counts_as_absent_once_another_has_waited_too_long():
    controller = Controller(3, *settings(2, 100))
    assert groups_of(controller, [0]) == []
    assert controller.release(0)
    assert controller.group.listed()[0] == (0,)
    assert groups_of(controller, [0, 0]) == [(0,), (0,)]
    assert groups_of(controller, [1]) == []
    assert groups_of(controller, [0]) == [(0, 1)]


@pytest.mark.parametrize("seed", range(60))
def test_the_filter_is_as_sets_and_lists_say_it(seed):
    check_controller(Controller, seed)


def check_controller(kind, seed, steps=300):
    draws = random.Random(seed)
    size = draws.randint(1, 9)
    group_size = draws.choice((2, 2, 3, draws.randint(2, max(size, 2))))
    history = max(1, controllers.shortest_history(size, group_size)) + draws.choice((0, 0, 1, 5))
    controller = kind(size, *settings(group_size, history))
    expected = Expected(size, group_size, history)
    speeds = [draws.choice((1, 1, 5, 0.1)) for _ in range(size)]
    # Often those of a clan are ready together.
    clans, loyalty = [draws.randrange(2) for _ in range(size)], draws.choice((0, 0.9, 1))
    clan, pauses, tick = 0, 0, draws.choice((0, 1, 10**8, 10**9))
    ranks = set(range(size))
    computing, resumed = set(ranks), False
    for _ in range(steps):
        expected.now += draws.choice((0, 0, 0, 1, 2, 9)) * tick
        controller.now = expected.now
        able = sorted(computing - expected.away - expected.left)
        if draws.random() < loyalty:
            able = [rank for rank in able if clans[rank] == clan] or able
        if able and draws.random() < 0.99:
            (rank,) = draws.choices(able, [speeds[rank] for rank in able])
            controller.signal(rank, 0, pauses, False)
            expected.signal(rank, resumed)
            resumed = False
            computing.remove(rank)
        else:
            rank = draws.choice(sorted(ranks))
            if rank in expected.left or rank in expected.away:
                continue
            leaves = draws.random() < 0.03
            alone = controller.withdraw(rank, 0, pauses + 1, leaves)
            assert alone == (rank in expected.queue)
            (expected.left if leaves else expected.away).add(rank)
            if alone:
                expected.end([rank])
                assert controller.group.listed() == ((rank,), (1.0,))
            computing.add(rank)
            if expected.away | expected.left == ranks:
                pauses, expected.away, resumed = pauses + 1, set(), True
        while True:
            group = expected.form()
            assert controller.form() == (group is not None)
            assert controller.held == expected.held
            if group is None:
                break
            assert controller.group.listed()[0] == tuple(sorted(group))
            computing |= set(group)
            clan = draws.randrange(2)
        assert controller.waiting == len(expected.queue)
    groups = expected.groups
    assert controller.formed == len(groups)
    if groups:
        matrix = np.eye(size) + (
            np.array(controller.met).reshape(size, size) - np.diag(controller.taken)
        ) / len(groups)
        np.testing.assert_allclose(matrix, averaging_matrix(groups, size), atol=1e-12)
    return controller.bridges, controller.holds, controller.in_vain, controller.absences


def test_the_reference_bridges_and_holds_and_some_are_late():
    counts = [check_controller(Controller, seed) for seed in range(60)]
    bridges, holds, in_vain, absences = map(sum, zip(*counts))
    assert bridges > 100 and holds > 100 and in_vain > 10 and absences > 100


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


@pytest.mark.slow
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


def test_nobody_waits_for_late_ranks_in_every_order():
    """Nobody has to say how long it has waited."""
    programs, group_size, history = BARRIERS["one makes none before"]
    assert ReadyWorld(programs, settings(group_size, history), passes=9).explore() > 10


@pytest.mark.parametrize("tick", [0, 10**6, 10**9])
def test_nobody_waits_for_late_ranks(tick):
    worlds = [run_drawn(seed, passes=300, tick=tick) for seed in range(40)]
    assert all(world.passes > 0 for world in worlds)
    assert sum(world.controlling.controller.absences > 0 for world in worlds) > 20


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
    assert [other for other in range(5) if world.protocols[1].waits_for(other)] == [0, 2, 3, 4]
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
    return not self.left[rank] and not self.late[rank]


def late_for_good(self, rank, iteration, pauses, fresh):
    late = self.late[rank]
    Controller.signal(self, rank, iteration, pauses, fresh)
    self.late[rank] = late


WRONG_CONTROLLERS = {
    "without a filter": {"choose": never_chooses},
    "one that acts before the history is full": {"choose": acts_at_once},
    "one that holds groups for ever": {"is_worth_waiting": lambda self, count: True},
    "one that never holds any": {"is_worth_waiting": lambda self, count: False},
    "one that waits for late ranks": {"drop_late": lambda self, all_others: False},
    "one for which late ranks are absent for good": {"signal": late_for_good},
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
            self.notify(source.READY)


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
