"""Who is in which of Ripples' groups: the schedule, and the generator's decisions."""

import math
import random
from collections import Counter

import networkx
import pytest
from formed_groups import source
from generated_groups import generators

from collectives.topology import STATIC_PERIOD, static_groups

ALONE, BUFFERED = generators.ALONE, generators.BUFFERED


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


def buffered_generator(size, group_size=3, seed=0):
    return generators.GroupGenerator(size, group_size, seed, buffered=True)


def test_a_buffered_request_gets_the_oldest_group_with_its_rank_and_makes_one_if_there_is_none():
    """Section 5.1: whoever is in groups makes none before it has asked for each of them."""
    generator, draws = buffered_generator(7), random.Random(1)
    buffers = [[] for _ in range(7)]
    for _ in range(3000):
        rank = draws.randrange(7)
        if buffers[rank]:
            assert ask(generator, rank) == BUFFERED
        else:
            [group] = ask(generator, rank)
            assert len(set(group)) == 3 and rank in group
            for member in group:
                buffers[member].append(group)
        buffers[rank].pop(0)


def test_a_buffered_group_has_random_ranks_also_such_as_are_in_others():
    counts = Counter()
    for seed in range(3000):
        [group] = ask(buffered_generator(7, seed=seed), 2)
        counts[group] += 1
    assert len(counts) == math.comb(6, 2)
    assert chi_square(counts, len(counts)) < 36
    generator = buffered_generator(4)
    [first] = ask(generator, 0)
    [outsider] = set(range(4)) - set(first)
    [second] = ask(generator, outsider)
    assert set(first) & set(second)


def test_who_pauses_leaves_its_buffered_groups():
    generator = buffered_generator(3)
    ask(generator, 0)
    generator.pause(1, 1, False)
    assert set(ask(generator, 0)[0]) == {0, 2}
    for rank in (0, 2):
        generator.pause(rank, 1, False)
    assert ask(generator, 1, 1) == [(0, 1, 2)]


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


@pytest.mark.parametrize(
    "nodes",
    [
        [0, 1, 2, 3],
        [0, 0, 1, 1, 2, 2, 3, 3],
        [0, 0, 0, 1, 1, 1],
        [0, 0, 0, 0, 1, 1, 1, 1],
        [0, 0, 1, 1, 1, 2],
        [0, 1, 1, 2, 2, 2, 3, 3, 3, 3],
    ],
)
def test_only_heads_are_in_groups_with_ranks_of_other_nodes(nodes):
    """Section 5.2; a rank that is alone beside its head is in a group by itself."""
    for seed in range(40):
        inter, intra = divided(nodes, 3, seed=seed)
        heads = [m for group in inter if len({nodes[r] for r in group}) > 1 for m in group]
        assert sorted(nodes[head] for head in heads) == list(range(nodes[-1] + 1))
        assert sorted(member for group in inter for member in group) == list(range(len(nodes)))
        assert [nodes[member] for [member] in (group for group in inter if len(group) == 1)] == [
            node for node in range(nodes[-1] + 1) if nodes.count(node) == 2
        ]
        assert intra == [
            tuple(rank for rank in range(len(nodes)) if nodes[rank] == node)
            for node in range(nodes[-1] + 1)
            if nodes.count(node) > 1
        ]


def test_a_rank_alone_beside_its_head_does_not_wait_for_its_heads_second_request():
    """It has two groups like all others: itself, and then its node."""
    generator = generator_of(4, 3, [0, 0, 1, 1])
    inter, intra = ask(generator, 0), [(0, 1), (2, 3)]
    assert inter[-2:] == intra
    for rank in (1, 2, 3):
        assert ask(generator, rank) == BUFFERED
    for rank in range(4):
        assert ask(generator, rank) == BUFFERED
    assert ask(generator, 3)[-2:] == intra


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


def test_a_rank_that_was_left_out_is_so_after_all_have_paused():
    """C_thres's counters go on: one average of all ranks does not make a slow rank fast."""
    generator = generator_of(4, 4, [0] * 4)
    for rank in (0, 1, 3):
        generator.requests[rank] = generator.most_requests = 50
    for pauses in (1, 2):
        for rank in range(4):
            generator.pause(rank, pauses, False)
        assert ask(generator, 0, pauses) == [(0, 1, 3)]
    for rank in range(4):
        generator.pause(rank, 3, False)
    generator.restart()
    assert ask(generator, 0, 3) == [(0, 1, 2, 3)]


def test_a_rank_that_pauses_before_the_others_is_not_behind_them_after_it():
    generator = generator_of(3, 3, [0] * 3)
    generator.pause(2, 1, False)
    for _ in range(30):
        assert ask(generator, 0) == [(0, 1)]
        assert ask(generator, 1) == BUFFERED
    generator.pause(2, 1, False)  # again, as where others have waited for it
    for rank in (0, 1):
        generator.pause(rank, 1, False)
    assert ask(generator, 1, 1) == [(0, 1, 2)]


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
def test_a_late_rank_is_in_no_group_until_its_next_request(nodes):
    """It is as far as the fastest then."""
    generator = generator_of(3, 3, nodes)
    generator.lag(2)
    for _ in range(30):
        assert set().union(*ask(generator, 0)) == {0, 1}
        assert nodes is None or ask(generator, 1) == BUFFERED
    assert ask(generator, 2) == ([(0, 1, 2)])
    assert nodes is None or ask(generator, 0) == ask(generator, 1) == BUFFERED
    assert ask(generator, 0) == [(0, 1, 2)]


@pytest.mark.parametrize("nodes", [None, [0] * 3])
def test_who_is_left_alone_is_told_so(nodes):
    generator = generator_of(3, 2, nodes)
    generator.pause(0, 1, True)
    generator.pause(1, 1, True)
    assert [ask(generator, 2) for _ in range(5)] == [ALONE] * 5
