"""Ripples' ranks in a network without MPI, and in simulated time."""

import itertools
import random

import numpy as np
import pytest
from formed_groups import replay
from generated_groups import (
    BARRIER,
    CALL,
    INTERRUPTED,
    MEET,
    Generated,
    Programs,
    Static,
    generated,
    generators,
    with_generator,
    with_schedule,
)

from collectives.protocols.scripted import ScriptedGroupProtocol
from collectives.topology import static_groups
from wagma.simulation import FREE, MACHINES, Settings, simulate
from wagma.simulation.core import Simulation
from wagma.simulation.formed_groups import FormedGroupMethod
from wagma.simulation.ripples import ripples


def change(rank, call):
    """What a rank's application changes before a call; before the first, what it begins with."""
    return np.random.default_rng([rank, call + 1]).standard_normal(3)


def makers(size, seed=0):
    """Return what makes ranks of each kind."""
    third = [3 * rank // size for rank in range(size)]
    mixed = [rank % 2 for rank in range(size)]
    last = size - 1
    return {
        "random": with_generator(group_size=2 + seed % 2, seed=seed, controller=last),
        "buffered": with_generator(
            group_size=2 + seed % 2, buffered=True, seed=seed, controller=last
        ),
        "smart": with_generator(
            group_size=2 + seed % 3, nodes=[0] * size, threshold=1 + seed % 5, seed=seed
        ),
        "smart, on nodes": with_generator(
            group_size=2 + seed % 2, nodes=mixed if seed % 2 else third, seed=seed, controller=last
        ),
        "static": with_schedule(local_size=1 + seed % 5),
    }


SMALL = {
    "two calls": [[CALL, CALL]] * 2,
    "meeting": [[CALL, MEET, CALL]] * 2,
    "unequal": [[CALL], [CALL, CALL, CALL]],
    "interrupted": [[INTERRUPTED], [CALL, CALL]],
}


@pytest.mark.extra
@pytest.mark.parametrize("program", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("kind", makers(1))
def test_everybody_comes_to_an_end_in_every_order(kind, program):
    assert Programs(program, makers(2)[kind], change).explore() > 20


@pytest.mark.extra
@pytest.mark.parametrize("kind", makers(1))
def test_three_ranks_come_to_an_end_in_every_order(kind):
    assert Programs([[CALL], [CALL], []], makers(3)[kind], change).explore() > 40


BARRIERS = {
    "a call each": [[CALL, BARRIER]] * 2,
    "one makes none before": [[CALL, BARRIER], [BARRIER, CALL]],
    "and they meet": [[CALL, BARRIER, MEET], [BARRIER, MEET, CALL]],
}


@pytest.mark.parametrize("spurious", [0, pytest.param(1, marks=pytest.mark.extra)])
@pytest.mark.parametrize("program", BARRIERS.values(), ids=BARRIERS)
@pytest.mark.parametrize("kind", ["random", "buffered", "smart", "smart, on nodes"])
def test_nobody_waits_for_one_that_waits_elsewhere_in_every_order(kind, program, spurious):
    assert Programs(program, makers(2)[kind], change, spurious=spurious, overdue=6).explore() > 20


def test_without_a_limit_some_wait_for_ever():
    with pytest.raises(AssertionError, match="waits for group"):
        Programs(BARRIERS["one makes none before"], makers(2)["random"], change).explore()


EXTRA = [pytest.param(each, marks=pytest.mark.extra) for each in ("buffered", "smart, on nodes")]


@pytest.mark.parametrize(
    "program",
    [
        BARRIERS["one makes none before"],
        pytest.param(BARRIERS["and they meet"], marks=pytest.mark.extra),
    ],
)
@pytest.mark.parametrize("kind", ["random", "smart", *EXTRA])
def test_ranks_let_go_of_groups_as_time_passes_in_every_order(kind, program):
    """No rank has to report that it waits: a late one lets go, or one that has not begun."""
    assert Programs(program, makers(2)[kind], change, passes=9).explore() > 20


@pytest.mark.parametrize("tick", [0, 10**6, 10**9])
@pytest.mark.parametrize("kind", ["random", "buffered", "smart", "smart, on nodes"])
def test_ranks_let_go_of_groups_as_time_passes(kind, tick):
    worlds = [run_with_barriers(kind, 5, seed, passes=300, tick=tick) for seed in range(10)]
    assert all(world.passes > 0 for world in worlds)
    assert sum(world.passes < 300 for world in worlds) > 3 or tick == 10**9


@pytest.mark.parametrize("spurious", [0, 5])
@pytest.mark.parametrize("size", [3, 5, 8])
@pytest.mark.parametrize("kind", ["random", "buffered", "smart", "smart, on nodes"])
def test_nobody_waits_for_one_that_waits_elsewhere(kind, size, spurious):
    helped = 0
    for seed in range(40):
        world = run_with_barriers(kind, size, seed, spurious=spurious, overdue=300)
        helped += world.overdue < 300
        assert world.overdue > 0
    assert helped > 10


def drawn_programs(size, seed):
    """Ranks that make different numbers of calls between what all do together."""
    draws = random.Random(seed)
    meetings = draws.randint(0, 2)
    programs = []
    for _ in range(size):
        program = [CALL] * draws.randint(0, 4)
        for _ in range(meetings):
            program += [MEET] + [CALL] * draws.randint(0, 4)
        programs.append(program + [INTERRUPTED] * (draws.random() < 0.3))
    return programs


def run_with_barriers(kind, size, seed, makers=makers, **limits):
    programs = [
        [each for step in program for each in ([BARRIER, MEET] if step == MEET else [step])]
        for program in drawn_programs(size, seed)
    ]
    world = Programs(programs, makers(size, seed)[kind], change, **limits)
    world.run(seed)
    return world


def run(kind, size, seed, makers=makers):
    world = Programs(drawn_programs(size, seed), makers(size, seed)[kind], change)
    world.run(seed)
    return world


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("kind", makers(1))
def test_groups_are_averaged_one_after_another_by_each_member_in_drawn_orders(kind, size):
    """As if one had been averaged after the other, in the generator's order."""
    for seed in range(40 if size < 8 else 15):
        world = run(kind, size, seed)
        logs = [protocol.log for protocol in world.protocols]
        start = [change(rank, -1) for rank in range(size)]
        expected = replay(world.formed, logs, start, change)
        np.testing.assert_allclose(
            [port.vector for port in world.ports], expected, rtol=1e-12, atol=1e-12
        )


def calls_of(log):
    """Return for each call of a log the groups that it was in."""
    calls, groups = [], None
    for event, *rest in log:
        if event == "call":
            groups = []
        elif event == "return":
            calls.append(groups)
        elif rest[0]:
            groups.append(event)
    return calls


def equal_programs(size):
    return [[CALL] * 6 + [MEET] + [CALL] * 6] * size


@pytest.mark.parametrize("kind", makers(1))
def test_a_call_is_in_its_groups_and_counts_where_it_is_in_none(kind):
    several = 0
    for seed in range(20):
        world = Programs(equal_programs(6), makers(6, seed)[kind], change)
        world.run(seed)
        for protocol in world.protocols:
            calls = calls_of(protocol.log)
            assert sum(not groups for groups in calls) == protocol.alone
            several += sum(len(groups) > 1 for groups in calls)
            if kind in ("random", "buffered"):
                # A call ends with the group that it has asked for itself.
                assert protocol.alone < 4
        if kind == "static":
            local_size = 1 + seed % 5
            for rank, protocol in enumerate(world.protocols):
                for call, groups in enumerate(calls_of(protocol.log)):
                    scheduled = static_groups(6, local_size, call)
                    [mine] = [g for g in scheduled if rank in g] or [()]
                    members = [m for number, m, _ in world.formed if number in groups]
                    assert members == ([mine] if mine else [])
    assert (several > 100) == (kind == "random")


@pytest.mark.parametrize("kind", makers(1))
def test_after_a_meeting_nobody_goes_on_without_those_that_have_paused(kind):
    """Each rank's first call after it is in a group of all that the schedule or the draw wants."""
    for seed in range(30):
        make = with_schedule(local_size=2) if kind == "static" else makers(2, seed)[kind]
        calls = [CALL] * (1 + (kind == "static"))
        world = Programs([[MEET, *calls]] * 2, make, change)
        world.run(seed)
        assert world.formed[0][1] == (0, 1)
        assert all(protocol.alone == (kind == "static") for protocol in world.protocols) or (
            kind in ("random", "buffered")
        )


# What waits, and for whom


def stuck(programs, make, seed=0):
    """Let all ranks do what they can, where one that is to `STOP` computes for ever."""

    class Stopped(Programs):
        def events(self):
            for event, what in super().events():
                stops = event == self._act and programs[what][self.ports[what].done :] == ["stop"]
                if not stops:
                    yield event, what

    world = Stopped(programs, make, change)
    draws = random.Random(seed)
    while events := list(world.events()):
        event, what = draws.choice(events)
        event(what)
    return world


def test_members_of_a_scheduled_group_wait_for_whom_has_not_come():
    world = stuck([[CALL], [CALL, CALL], [CALL, CALL], ["stop"]], with_schedule(local_size=4))
    waits = [[protocol.waits_for(rank) for rank in range(4)] for protocol in world.protocols]
    # Rank 0 has no group in the first iteration, and has left; rank 2 waits for rank 3 in it.
    assert waits[1] == [True, False, True, True]
    assert waits[2] == [False, False, False, True]
    assert waits[3] == [False] * 4
    assert not any(waits[0])


@pytest.mark.parametrize("nodes", [None, [0] * 3])
def test_who_waits_for_its_group_to_be_formed_waits_for_the_controller(nodes):
    make = with_generator(group_size=3, nodes=nodes, controller=1)
    world = Programs([[CALL]] * 3, make, change)
    world._act(0)
    assert [world.protocols[0].waits_for(rank) for rank in range(3)] == [False, True, False]
    world._deliver((0, 1))
    world._deliver((1, 0))
    assert [world.protocols[0].waits_for(rank) for rank in range(3)] == [False] * 3
    assert [step and step.number for step in world.ports[0].steps] == [0, None]


# Wrong ones


class Hasty(Generated):
    """Ends a call with any group, also if it is not the one that the call has asked for."""

    def proceed(self):
        if self.count and self.waiting:
            self.kept[self.first * self.stride + 1] = generators.ALONE
        super().proceed()


class Newest(Generated):
    """Carries out what it was told of last."""

    def keep(self, integers):
        super().keep(integers)
        for i in range(self.stride):
            one = self.first * self.stride + i
            other = (self.first + self.count - 1) % self.room * self.stride + i
            self.kept[one], self.kept[other] = self.kept[other], self.kept[one]


class Forgetful(Generated):
    """Pauses without the groups that it was put into."""

    def proceed(self):
        if self.waiting:
            super().proceed()


class Deaf(Generated):
    """Its generator does not hear that a rank pauses."""

    def arrived(self, source, integers):
        if integers[0] == generated.PAUSE:
            self.send(source, generated.PAUSED, False)
        else:
            super().arrived(source, integers)


class Silent(Generated):
    """Does not tell others that one waits for this rank, which waits for them."""

    def remind(self, number, too_long):
        if number == generated.LAST:
            super().remind(number, too_long)


class Impatient(Static):
    """Counts ranks as out, but does not look for groups that wait for them."""

    def look_after_all(self):
        pass


class Endless(Static):
    """Does not know that a group is over."""

    def begin_group(self, phase, iteration):
        super().begin_group(phase, iteration)
        self.begun[phase] = -1


def wrong_makers(kind):
    def made(size, seed=0):
        if issubclass(kind, Static):
            return {"static": with_schedule(local_size=1 + seed % 5, kind=kind)}
        return {
            "random": with_generator(group_size=3, seed=seed, kind=kind),
            "buffered": with_generator(group_size=3, buffered=True, seed=seed, kind=kind),
            "smart": with_generator(group_size=2, nodes=[0] * size, seed=seed, kind=kind),
            "smart, on nodes": with_generator(
                group_size=2, nodes=[rank % 2 for rank in range(size)], seed=seed, kind=kind
            ),
        }

    return made


WRONG = [
    (Newest, "random"),
    (Newest, "buffered"),
    (Newest, "smart, on nodes"),
    (Forgetful, "random"),
    (Forgetful, "buffered"),
    (Forgetful, "smart"),
    (Deaf, "random"),
    (Deaf, "buffered"),
    (Deaf, "smart"),
    (Impatient, "static"),
    (Endless, "static"),
]


@pytest.mark.parametrize(("wrong", "kind"), WRONG)
def test_wrong_ranks_are_caught(wrong, kind):
    with pytest.raises(AssertionError):
        for seed in range(200):
            run(kind, 5, seed, wrong_makers(wrong))


def test_ranks_that_let_go_of_groups_without_a_word_are_caught():
    with pytest.raises(AssertionError):
        for seed in range(200):
            run_with_barriers("smart, on nodes", 3, seed, wrong_makers(Silent), overdue=300)


def test_a_call_that_ends_too_early_is_caught():
    """Nobody hangs, but then the rank has not been in its own group."""
    with pytest.raises(AssertionError):
        for seed in range(50):
            programs = [[CALL] * 6] * 5
            world = Programs(programs, wrong_makers(Hasty)(5, seed)["random"], change)
            world.run(seed)
            for protocol in world.protocols:
                for call in calls_of(protocol.log):
                    assert call or protocol.alone
                assert len(list(itertools.chain(*calls_of(protocol.log)))) >= protocol.calls


# In simulated time


@pytest.mark.parametrize("groups", ["random", "buffered", "smart", "static"])
@pytest.mark.parametrize("size", [1, 3, 8, 24])
def test_compiled_ranks_decide_as_their_source_does(size, groups):
    times = np.random.default_rng(size).uniform(0.5e-6, 30e-6, (15, size))
    settings = Settings(4000, groups=groups, group_size=3, ranks_per_node=4, threshold=2, seed=5)
    compiled = Simulation(ripples(settings, size), MACHINES["hdr"], times)
    compiled.run()
    if groups == "static":
        make = with_schedule(local_size=4)
    else:
        nodes = [rank // 4 for rank in range(size)] if groups == "smart" else None
        make = with_generator(
            group_size=3, nodes=nodes, threshold=2, seed=5, buffered=groups == "buffered"
        )
    method = FormedGroupMethod(lambda *rank: ScriptedGroupProtocol(*rank, make), 4000)
    interpreted = Simulation(method, MACHINES["hdr"], times)
    interpreted.run()
    np.testing.assert_array_equal(compiled.ended, interpreted.ended)
    for rank in range(size):
        assert compiled.method.protocol(rank).alone == method.protocol(rank).script.alone
    assert compiled.method.updates > 0 or size == 1


def uneven(slow, steps=400):
    """Steps of 16 ranks that differ a little; rank 5's take so many times as long."""
    times = np.exp(0.05 * np.random.default_rng(1).standard_normal((steps, 16)))
    times[:, 5] *= slow
    return times


@pytest.mark.parametrize("slow", [3, 6])
@pytest.mark.parametrize("ranks_per_node", [4, 16])
def test_fast_ranks_of_a_smart_generator_do_not_wait_for_a_slow_one(ranks_per_node, slow):
    """Not even those of its node, as they do where it is never left out, or by a schedule."""

    def made(slow, **options):
        settings = Settings(8, ranks_per_node=ranks_per_node, **options)
        return np.delete(simulate("ripples", uneven(slow), FREE, settings, 300).made, 5)

    undisturbed = made(1)
    assert made(slow).min() > 0.95 * undisturbed.mean()
    assert made(slow, threshold=10**6).mean() < 0.93 * undisturbed.mean()
    assert made(slow, groups="static").max() < 1.1 * 300 / slow
    assert made(1, groups="static").mean() > 0.9 * 300


def test_a_slow_rank_is_in_groups_of_its_own_divisions():
    """But where it finds nobody idle."""
    method = ripples(Settings(8, ranks_per_node=4), 16)
    simulation = Simulation(method, FREE, uneven(6), 300)
    simulation.run()
    assert simulation.made[5] > 40
    assert method.protocol(5).alone < 0.4 * simulation.made[5]
