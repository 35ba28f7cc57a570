"""Ripples' groups: who is in which, the schedule, and their ranks in a network without MPI."""

import itertools
import math
import random
from collections import Counter

import networkx
import numpy as np
import pytest
from formed_groups import replay, source
from generated_groups import (
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

from collectives.topology import STATIC_PERIOD, static_groups

ALONE, BUFFERED = generators.ALONE, generators.BUFFERED


def change(rank, call):
    """What a rank's application changes before a call; before the first, what it begins with."""
    return np.random.default_rng([rank, call + 1]).standard_normal(3)


# The static schedule

FIGURE_9 = [
    [(0, 4, 8, 12), (2, 3), (6, 7), (10, 11), (14, 15)],
    [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)],
    [(0, 3), (1, 9), (4, 7), (5, 13), (8, 11), (12, 15)],
    [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)],
]


def test_the_schedule_of_16_ranks_on_4_nodes_is_the_papers():
    for iteration in range(12):
        assert static_groups(16, 4, iteration) == FIGURE_9[iteration % 4]


@pytest.mark.parametrize("local_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("fewer", [0, 1, 2])
def test_scheduled_groups_are_disjoint_and_connect_all_ranks_in_a_period(nodes, local_size, fewer):
    """With the last node full, or not."""
    size = max(1, nodes * local_size - min(fewer, local_size - 1))
    met = networkx.empty_graph(size)
    for iteration in range(STATIC_PERIOD):
        groups = static_groups(size, local_size, iteration)
        members = [member for group in groups for member in group]
        assert len(set(members)) == len(members) and set(members) <= set(range(size))
        assert groups == sorted(groups) and all(len(group) > 1 for group in groups)
        for group in groups:
            assert list(group) == sorted(group)
            networkx.add_path(met, group)
        if iteration % 2:
            assert all(group[0] // local_size == group[-1] // local_size for group in groups)
    assert networkx.is_connected(met)


@pytest.mark.parametrize("given", [(0, 4, 0), (4, 0, 0), (4, 4, -1)])
def test_a_schedule_of_nothing_is_refused(given):
    with pytest.raises(ValueError, match=r"must be 1 or more|is negative"):
        static_groups(*given)


# The generator


def generator_of(size, group_size, nodes=None, threshold=4, seed=0):
    return generators.GroupGenerator(size, group_size, seed, nodes, threshold)


def ask(generator, rank, pauses=0):
    """Return the groups that a request makes, or BUFFERED or ALONE."""
    count = generator.request(rank, pauses)
    if count <= 0:
        return count
    record = source.Group(room=generator.most)
    groups = []
    for index in range(count):
        generator.write(index, record)
        groups.append(record.listed()[0])
        assert record.number == generator.groups - count + index
    return groups


def chi_square(counts, cells):
    expected = sum(counts.values()) / cells
    return sum((count - expected) ** 2 / expected for count in counts.values())


def test_random_groups_have_the_requester_and_are_uniform():
    generator, counts = generator_of(7, 3), Counter()
    for _ in range(6000):
        [group] = ask(generator, 2)
        assert len(set(group)) == 3 and 2 in group
        counts[group] += 1
    assert len(counts) == math.comb(6, 2)
    # Of 14 degrees of freedom: more than 36 has a probability of a thousandth.
    assert chi_square(counts, len(counts)) < 36


def test_a_random_group_may_have_a_rank_that_is_in_others():
    generator = generator_of(4, 3)
    members = Counter(member for rank in range(4) for member in ask(generator, rank)[0])
    assert max(members.values()) > 2


@pytest.mark.parametrize("nodes", [None, [0] * 8, [0, 0, 0, 1, 1, 1, 2, 2]])
def test_requests_have_the_same_groups_for_the_same_seed_and_others_for_another(nodes):
    def groups(seed):
        generator, order = generator_of(8, 3, nodes, seed=seed), random.Random(1)
        return [ask(generator, order.randrange(8)) for _ in range(40)]

    assert groups(3) == groups(3)
    assert groups(3) != groups(4)


@pytest.mark.parametrize("group_size", [2, 3, 4, 9])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 12, 13])
def test_a_global_division_puts_every_idle_rank_into_one_group(size, group_size):
    """The others then have their group already; once all have asked for it there are new ones."""
    generator = generator_of(size, group_size, [0] * size)
    for first in range(size):
        groups = ask(generator, first)
        assert sorted(member for group in groups for member in group) == list(range(size))
        sizes = sorted(map(len, groups))
        assert sizes[0] >= 2 and sizes[-1] - sizes[0] <= 1
        # As few as can be; with pairs, three are one where one would be left over.
        assert len(groups) == (size // 2 if group_size == 2 else math.ceil(size / group_size))
        for rank in range(size):
            assert rank == first or ask(generator, rank) == BUFFERED


def test_divisions_are_uniform():
    generator, counts = generator_of(4, 2, [0] * 4), Counter()
    for _ in range(3000):
        counts[tuple(sorted(ask(generator, 0)))] += 1
        for rank in (1, 2, 3):
            assert ask(generator, rank) == BUFFERED
    assert len(counts) == 3
    assert chi_square(counts, 3) < 13.8


def test_only_ranks_that_wait_for_nobody_are_divided():
    """Neither those that have a group, nor those whose group has members that have not asked."""
    generator = generator_of(6, 3, [0] * 6)
    own, other = sorted(ask(generator, 0))
    assert ask(generator, own[1]) == BUFFERED
    assert ask(generator, own[2]) == BUFFERED
    # That group is complete, and its members are idle; the others are not, even one that waits.
    assert ask(generator, other[0]) == BUFFERED
    assert ask(generator, own[1]) == [own]


def test_who_finds_nobody_idle_is_alone():
    generator = generator_of(3, 3, [0] * 3)
    [group] = ask(generator, 0)
    assert group == (0, 1, 2)
    assert ask(generator, 1) == BUFFERED
    # It asks again before the generator has heard of the third member, which must have come.
    assert ask(generator, 1) == ALONE
    assert ask(generator, 2) == BUFFERED
    assert ask(generator, 1) == [(0, 1, 2)]
    assert ask(generator_of(1, 3, [0]), 0) == ask(generator_of(1, 3), 0) == ALONE


@pytest.mark.parametrize("threshold", [1, 2, 4, 8])
@pytest.mark.parametrize("nodes", [[0] * 4, [0, 0, 1, 1]])
def test_a_rank_that_is_too_far_behind_is_left_out(nodes, threshold):
    """It is in divisions of ranks that have made fewer requests more than it than the threshold."""
    for behind in range(12):
        generator = generator_of(4, 4, nodes, threshold)
        for rank in range(4):
            generator.requests[rank] = 20 - behind * (rank == 2)
        members = {member for group in ask(generator, 0) for member in group}
        assert members == ({0, 1, 2, 3} if behind < threshold else {0, 1, 3})


def test_a_slow_rank_s_own_division_has_faster_ones():
    generator = generator_of(4, 4, [0] * 4)
    for rank in (0, 1, 3):
        generator.requests[rank] = 50
    assert ask(generator, 0) == [(0, 1, 3)]
    assert ask(generator, 2) == ALONE
    for rank in (1, 3):
        assert ask(generator, rank) == BUFFERED
    assert ask(generator, 2) == [(0, 1, 2, 3)]


def test_who_waits_for_a_slow_rank_does_not_count_as_slow():
    """It is as far as the fastest once the slow one has come, which then is left out."""
    generator = generator_of(4, 2, [0] * 4)
    groups = ask(generator, 0)
    slow, partner = next(group for group in groups if 0 not in group)
    [other] = [rank for rank in range(1, 4) if rank not in (slow, partner)]
    assert ask(generator, other) == BUFFERED
    assert ask(generator, partner) == BUFFERED
    for _ in range(20):
        assert ask(generator, 0) == [(0, other)]
        assert ask(generator, other) == BUFFERED
    assert ask(generator, slow) == BUFFERED
    assert generator.requests[slow] == 1
    assert generator.requests[partner] == generator.requests[0] == 21
    members = {member for group in ask(generator, 0) for member in group}
    assert members == {0, other, partner}


def test_a_slow_rank_is_in_no_group_that_waits_for_its_next_request():
    """Its division puts it into one with others of its node, but not into a second one."""
    generator = generator_of(6, 3, [0, 0, 0, 1, 1, 1])
    for rank in range(1, 6):
        generator.requests[rank] = 50
    groups = ask(generator, 0)
    assert [group for group in groups if 0 in group] == groups[:1] or len(groups[1]) == 2
    assert groups[-2:] == [(1, 2), (3, 4, 5)]


# Nodes


def divided(nodes, group_size, rank=0, seed=0):
    """Return the groups of the first division, and of the second, of idle ranks on these nodes."""
    generator = generator_of(len(nodes), group_size, nodes, seed=seed)
    groups = ask(generator, rank)
    seen = set()
    for count, group in enumerate(groups):
        if seen & set(group):
            return groups[:count], groups[count:]
        seen |= set(group)
    return groups, []


@pytest.mark.parametrize("group_size", [2, 3, 5])
@pytest.mark.parametrize("per_node", [3, 4, 6])
@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_heads_average_between_nodes_and_others_within_them(count, per_node, group_size):
    nodes = [rank // per_node for rank in range(count * per_node)]
    heads_of_all = set()
    for seed in range(80):
        inter, intra = divided(nodes, group_size, seed=seed)
        heads = [m for group in inter if len({nodes[r] for r in group}) > 1 for m in group]
        assert sorted(nodes[head] for head in heads) == list(range(count))
        heads_of_all.update(heads)
        members = sorted(member for group in inter for member in group)
        assert members == list(range(len(nodes)))
        assert all(2 <= len(group) <= max(group_size, 3) for group in inter)
        ranks = range(len(nodes))
        assert intra == [tuple(r for r in ranks if nodes[r] == node) for node in range(count)]
    assert len(heads_of_all) == len(nodes)


def test_one_rank_beside_its_head_goes_with_it_and_nobody_is_put_into_a_group_alone():
    for seed in range(20):
        inter, intra = divided([0, 0, 1, 1], 3, seed=seed)
        assert (inter, intra) == ([(0, 1, 2, 3)], [(0, 1), (2, 3)])
        assert divided([0, 1, 2], 3, seed=seed) == ([(0, 1, 2)], [])
        inter, intra = divided([0, 1, 1, 1, 1], 3, seed=seed)
        assert sorted(map(len, inter)) == [2, 3] and intra == [(1, 2, 3, 4)]


def test_where_one_node_has_idle_ranks_these_average_among_themselves():
    generator = generator_of(7, 2, [0, 0, 0, 0, 1, 1, 1])
    for rank in (4, 5, 6):
        generator.pause(rank, 1, False)
    groups = ask(generator, 1)
    assert sorted(map(len, groups)) == [2, 2, 4] and groups[-1] == (0, 1, 2, 3)


def test_heads_are_drawn_among_idle_ranks():
    """A rank that waits in a group of before is none."""
    nodes = [0, 0, 0, 1, 1, 1]
    for seed in range(20):
        generator = generator_of(6, 2, nodes, seed=seed)
        ask(generator, 0)
        generator.pause(3, 1, False)
        for rank in (1, 2, 4, 5, 0, 1, 2, 4, 5):
            assert ask(generator, rank) == BUFFERED
        groups = ask(generator, 4)
        assert all(3 not in group for group in groups)
        assert any({nodes[r] for r in group} == {0, 1} for group in groups)


# Ranks that pause


@pytest.mark.parametrize("nodes", [None, [0] * 5, [0, 0, 0, 1, 1]])
def test_who_pauses_is_in_no_group_until_somebody_who_has_met_it_asks(nodes):
    generator = generator_of(5, 5, nodes)
    generator.pause(3, 1, False)
    generator.pause(4, 1, True)
    assert set().union(*ask(generator, 0)) == {0, 1, 2}
    for rank in (0, 1, 2):
        generator.pause(rank, 1, False)
    assert set().union(*ask(generator, 1, 1)) == {0, 1, 2, 3}


@pytest.mark.parametrize("nodes", [None, [0] * 3])
def test_who_is_left_alone_is_told_so(nodes):
    generator = generator_of(3, 2, nodes)
    generator.pause(0, 1, True)
    generator.pause(1, 1, True)
    assert [ask(generator, 2) for _ in range(5)] == [ALONE] * 5


# Their ranks, in a network without MPI


def makers(size, seed=0):
    """Return what makes ranks of each kind."""
    third = [3 * rank // size for rank in range(size)]
    mixed = [rank % 2 for rank in range(size)]
    last = size - 1
    return {
        "random": with_generator(group_size=2 + seed % 2, seed=seed, controller=last),
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


@pytest.mark.parametrize("program", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("kind", makers(1))
def test_everybody_comes_to_an_end_in_every_order(kind, program):
    assert Programs(program, makers(2)[kind], change).explore() > 20


@pytest.mark.parametrize("kind", makers(1))
def test_three_ranks_come_to_an_end_in_every_order(kind):
    assert Programs([[CALL], [CALL], []], makers(3)[kind], change).explore() > 40


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


def run(kind, size, seed, makers=makers):
    world = Programs(drawn_programs(size, seed), makers(size, seed)[kind], change)
    world.run(seed)
    return world


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("kind", makers(1))
def test_groups_are_averaged_one_after_another_by_each_member_in_drawn_orders(kind, size):
    """As if one had been averaged after the other, in the generator's order."""
    for seed in range(40):
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
            if kind == "random":
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
            kind == "random"
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
            "smart": with_generator(group_size=2, nodes=[0] * size, seed=seed, kind=kind),
            "smart, on nodes": with_generator(
                group_size=2, nodes=[rank % 2 for rank in range(size)], seed=seed, kind=kind
            ),
        }

    return made


WRONG = [
    (Newest, "random"),
    (Newest, "smart, on nodes"),
    (Forgetful, "random"),
    (Forgetful, "smart"),
    (Deaf, "random"),
    (Deaf, "smart"),
    (Impatient, "static"),
    (Endless, "static"),
]


@pytest.mark.parametrize(("wrong", "kind"), WRONG)
def test_wrong_ranks_are_caught(wrong, kind):
    with pytest.raises(AssertionError):
        for seed in range(200):
            run(kind, 5, seed, wrong_makers(wrong))


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
