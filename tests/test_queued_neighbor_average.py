"""Hop's protocol on the in-memory network: what its paper states of it, and how far ranks get."""

import functools
import random

import numpy as np
import pytest
from peer_network import (
    CALL,
    INTERRUPTED,
    JOIN,
    LEAVE,
    MEET,
    RESTART,
    STOP,
    Rank,
    Stage,
    World,
    explore,
    neighbor_average,
    queued_neighbor_average,
    require,
    run,
)

from collectives import graphs

LENGTH = 3
NEAR = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
Protocol = queued_neighbor_average.QueuedNeighborAverageProtocol


def both_ways(edges):
    edges = frozenset(edges)
    return edges | {(b, a) for a, b in edges}


def ring_based(size):
    return graphs.ring(size) | both_ways((i, (i + size // 2) % size) for i in range(size))


def double_ring(size):
    half = size // 2
    one = ring_based(half)
    other = {(a + half, b + half) for a, b in one}
    return frozenset(one | other | both_ways((i, i + half) for i in range(half)))


def directed_ring(size):
    return frozenset((i, (i + 1) % size) for i in range(size))


GRAPHS = {
    "ring": graphs.ring,
    "ring-based": ring_based,
    "double-ring": double_ring,
    "directed ring": directed_ring,
}
each_graph = pytest.mark.parametrize("make_edges", GRAPHS.values(), ids=GRAPHS)
each_size = pytest.mark.parametrize("size", (8, 16))


# What Table 1 allows: by name, settings, and b0, how far a rank may be ahead of a source of its own
# (None: any number).
SETTINGS = {
    "standard": ({"max_gap": None}, 1),
    "standard, serial": ({"max_gap": None, "order": "serial"}, 1),
    "staleness 2": ({"max_gap": None, "staleness": 2}, 3),
    "tokens": ({"max_gap": 2}, 1),
    "tokens, staleness 3": ({"max_gap": 3, "staleness": 3}, 4),
    "tokens, serial": ({"max_gap": 2, "order": "serial"}, 1),
    "backup": ({"max_gap": 3, "backup": 1}, None),
    "hybrid": ({"max_gap": 4, "backup": 1, "staleness": 2}, None),
    "notify-ack": ({"max_gap": None, "mode": "notify-ack"}, 1),
    "notify-ack, serial": ({"max_gap": None, "mode": "notify-ack", "order": "serial"}, 1),
    "skipping": ({"max_gap": 2, "backup": 1, "max_skip": 10}, None),
    "skipping, staleness": ({"max_gap": 4, "staleness": 3, "max_skip": 3}, 4),
}
each_setting = pytest.mark.parametrize("settings, ahead", SETTINGS.values(), ids=SETTINGS)


def change(rank, call):
    """What a rank's application changes in a call: float64 array of shape (LENGTH,)."""
    return np.random.default_rng([rank, call]).standard_normal(LENGTH)


def start(size):
    return np.array([np.random.default_rng(rank).standard_normal(LENGTH) for rank in range(size)])


class Until(int):
    """Of a program: calls until this iteration."""


class Iterations(World):
    """A world whose programs may have `Until`: a rank that skips makes fewer calls."""

    def _begin(self, rank, action):
        super()._begin(rank, CALL if isinstance(action, Until) else action)

    def _return(self, rank):
        position = rank.position
        super()._return(rank)
        if rank.position > position:
            action = self.programs[rank.number][position]
            if isinstance(action, Until) and rank.protocol.calls < action:
                rank.position = position


class Averager(Rank):
    """A rank that knows which messages its model has been averaged with since its call began."""

    mixed = ()

    def mix(self, source, keep, share):
        message = self.kept[source][0]
        self.mixed = (*self.mixed, (source, message.number, message.value, self.protocol.calls))
        return super().mix(source, keep, share)


def world_of(edges, programs, check=None, protocol=Protocol, change=change, **settings):
    """Return a world of Hop's ranks on this graph."""
    size = len(programs)
    ranks = [Averager(number, model) for number, model in enumerate(start(size))]
    for number, rank in enumerate(ranks):
        sources, destinations = graphs.sources(edges, number), graphs.destinations(edges, number)
        rank.attach(protocol(rank.driven, number, size, sources, destinations, **settings))
    return Iterations(ranks, programs, change, check)


def run_without(world, rank, generator):
    """Let everything happen but steps of one rank's application; return the world in the end."""
    while events := [event for event in world.events() if event != (rank,)]:
        world = world.after(generator.choice(events))
    return world


def iterations(world):
    return [rank.protocol.calls for rank in world.ranks]


def distances(edges, size, forward=1, backward=None):
    """Return from each rank to each the shortest way: int array of shape (size, size).

    Args:
        forward, backward: how long an edge is along its direction, and against it (None: no way).
    """
    far = np.full((size, size), 10**6)
    for a, b in edges:
        if backward is not None:
            far[b, a] = min(far[b, a], backward)
        if forward is not None:
            far[a, b] = min(far[a, b], forward)
    far[np.diag_indices(size)] = 0
    for k in range(size):
        far = np.minimum(far, far[:, [k]] + far[[k], :])
    return far


def bounds(edges, size, settings, ahead):
    """Return Table 1's bounds of Iter(i) − Iter(j) as an array [j, i]."""
    paths = distances(edges, size)
    found = np.full((size, size), 10**6)
    if ahead is not None:
        found = ahead * paths
    back = 2 if settings.get("mode") == "notify-ack" else settings["max_gap"]
    return found if back is None else np.minimum(found, back * paths.T)


def keeps_within(edges, size, settings, ahead):
    """Return a check of every bound that the paper gives, and of what is skipped."""
    most, paths = bounds(edges, size, settings, ahead), distances(edges, size)
    max_gap, staleness = settings["max_gap"], settings.get("staleness")
    degrees = [1 + len(graphs.sources(edges, rank)) for rank in range(size)]

    def check(before, world, rank):
        me, mine = rank.number, rank.protocol
        for other in world.ranks:
            gap = mine.calls - other.protocol.calls
            require(gap <= most[other.number, me], "Table 1", me, other.number, gap)
        for source, messages in rank.kept.items():
            if max_gap is None and staleness is None:
                require(len(messages) <= paths[me, source] + 1, "the buffer's bound", source)
        queued = sum(map(len, rank.kept.values()))
        if staleness is not None:
            require(queued <= degrees[me], "the newest of each", queued)
        elif max_gap is not None:
            require(queued <= (1 + max_gap) * degrees[me], "the update queue's bound", queued)
        if max_gap is not None:
            check_tokens(world, rank)
        check_skip(before, world, rank)

    def check_tokens(world, rank):
        for i, peer in enumerate(rank.protocol.awaited):
            if rank.protocol.is_destination[i]:
                tokens = rank.protocol.entered[i] - rank.protocol.calls + max_gap
                full = world.ranks[peer].protocol.calls - rank.protocol.calls + max_gap
                require(0 <= tokens <= full, "tokens are what has been given", peer)
                most_tokens = max_gap * (paths[peer, rank.number] + 1)
                require(full <= most_tokens, "the token queue's bound", full)

    def check_skip(before, world, rank):
        skipped = rank.protocol.skipped - before.ranks[rank.number].protocol.skipped
        if skipped:
            least = min(
                world.ranks[peer].protocol.calls for peer in graphs.destinations(edges, rank.number)
            )
            require(rank.protocol.calls <= least, "a jump passes nobody", rank.number)
            require(skipped < settings["max_skip"], "a jump is not too far", skipped)

    return check


@each_graph
@each_setting
@each_size
def test_no_order_breaks_a_bound_and_everybody_comes_to_an_end(size, settings, ahead, make_edges):
    edges = make_edges(size)
    check = keeps_within(edges, size, settings, ahead)
    programs = [(Until(6), LEAVE)] * size
    ended = run(world_of(edges, programs, check, **settings), random.Random(size))
    ended.require_end()
    assert iterations(ended) == [6] * size


def uneven(world, generator, events, slow=None):
    """Let so many events happen, of some ranks much less often; or calls of these, if given."""
    eagerness = [generator.choice((0.02, 1)) for _ in world.ranks]

    def weight(event):
        if slow is None:
            return eagerness[event[-1]]
        return 0.01 if event in slow else 1

    for _ in range(events):
        found = world.events()
        if not found:
            break
        world = world.after(*generator.choices(found, list(map(weight, found))))
    return world


@each_graph
@each_setting
@each_size
def test_no_bound_is_broken_where_some_are_much_slower(size, settings, ahead, make_edges):
    edges = make_edges(size)
    check = keeps_within(edges, size, settings, ahead)
    world = world_of(edges, [(CALL,) * 99] * size, check, **settings)
    world = uneven(world, random.Random(size), 300)
    assert max(iterations(world)) > 0


def reached(edges, size, calls=40, seed=0, **settings):
    """Return how far each rank gets where rank 0 stops at once."""
    programs = [(STOP,)] + [(CALL,) * calls] * (size - 1)
    return run(world_of(edges, programs, **settings), random.Random(seed))


@each_graph
@each_size
@pytest.mark.parametrize("staleness", (None, 0, 2))
def test_without_tokens_theorem_1_and_staleness_are_reached(size, make_edges, staleness):
    edges = make_edges(size)
    ended = reached(edges, size, 80, max_gap=None, staleness=staleness)
    far = ((staleness or 0) + 1) * distances(edges, size)[0]
    assert iterations(ended) == far.tolist()


@each_graph
@each_size
@pytest.mark.parametrize("max_gap, staleness", ((1, None), (2, None), (3, 2), (2, 4)))
def test_with_tokens_theorem_2_is_reached_where_it_can_bind(size, make_edges, max_gap, staleness):
    """The paper's bound is of two ways; the shortest one may go along edges and against them."""
    edges = make_edges(size)
    ahead = (staleness or 0) + 1
    ended = reached(edges, size, 80, max_gap=max_gap, staleness=staleness)
    assert iterations(ended) == distances(edges, size, ahead, max_gap)[0].tolist()
    paper = bounds(edges, size, {"max_gap": max_gap}, ahead)[0]
    assert (np.array(iterations(ended)) <= paper).all()
    # It binds between neighbors, and by tokens alone where the way back is short.
    assert max(iterations(ended)) >= min(ahead, max_gap)
    assert sum(iterations(ended) == paper) > 1
    for rank in graphs.destinations(edges, 0):
        assert iterations(ended)[rank] == paper[rank]


def test_a_queue_of_updates_gets_as_full_as_theorem_1_says():
    """At rank i, of j's there are length(Path i→j) + 1: 4.1 once has the way the other way round.

    On a directed ring that is all ranks, where 4.1's would be two.
    """
    ended = reached(directed_ring(8), 8, max_gap=None)
    assert [message.number for message in ended.ranks[0].kept[7]] == list(range(8))
    # By tokens, max_gap + 1.
    ended = reached(directed_ring(8), 8, max_gap=3)
    assert [message.number for message in ended.ranks[0].kept[7]] == list(range(4))


@pytest.mark.parametrize("make_edges", (graphs.ring, ring_based, double_ring))
@each_size
def test_backups_alone_are_apart_without_bound_and_by_max_gap_with_tokens(size, make_edges):
    edges = make_edges(size)
    for calls in (10, 60):
        free = reached(edges, size, calls, max_gap=None, backup=1, slots=calls + 1)
        assert iterations(free)[1:] == [calls] * (size - 1)
    for staleness in (None, 1):
        ended = reached(edges, size, 60, max_gap=4, backup=1, staleness=staleness)
        neighbors = graphs.sources(edges, 0)
        assert {iterations(ended)[rank] for rank in neighbors} == {4}
        bound = bounds(edges, size, {"max_gap": 4}, None)[0]
        assert (np.array(iterations(ended)) <= bound).all()
    hybrid = reached(edges, size, 60, max_gap=None, backup=1, staleness=1)
    assert iterations(hybrid)[1:] == [60] * (size - 1)


def test_backups_and_tokens_are_apart_by_table_1s_last_column():
    """On a path of two triangles, of which rank 0 is the end."""
    edges = both_ways(((0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (3, 4), (2, 4), (3, 5), (4, 5)))
    ended = reached(edges, 6, 60, max_gap=3, backup=2)
    assert iterations(ended) == (3 * distances(edges, 6)[:, 0]).tolist()


@each_graph
@each_size
def test_notify_ack_keeps_ranks_closer_than_its_bound(size, make_edges):
    """A rank's word that it has used an update comes as it enters the next iteration.

    So it is at most one ahead of all that it has edges from and to, where the paper has two for the
    latter; and of whom else its sources have edges to, for whose word these wait.
    """
    edges = make_edges(size)
    near = edges | {(b, a) for a, b in edges}
    near |= {(c, b) for a, b in edges for d, c in edges if a == d and b != c}
    ended = reached(edges, size, max_gap=None, mode="notify-ack")
    assert iterations(ended) == distances(near, size)[0].tolist()
    assert all(len(messages) == 1 for messages in ended.ranks[0].kept.values())


# What is averaged


def trajectory(edges, size, calls, order="parallel"):
    """Return x_0, x_1, …, each of shape (size, LENGTH), of weights 1/|N_in|."""
    matrix = np.eye(size)
    for a, b in edges:
        matrix[a, b] = 1
    matrix /= matrix.sum(axis=0)
    states = [start(size)]
    for call in range(calls):
        changes = np.array([change(rank, call) for rank in range(size)])
        models = states[-1]
        if order == "serial":
            states.append(matrix.T @ (models + changes))
        else:
            states.append(matrix.T @ models + changes)
    return states


@each_graph
@pytest.mark.parametrize(
    "settings",
    ({"max_gap": None}, {"max_gap": 2}, {"max_gap": None, "mode": "notify-ack"}),
    ids=str,
)
@pytest.mark.parametrize("order", ("parallel", "serial"))
def test_every_order_of_events_gives_the_recurrence(make_edges, settings, order):
    edges = make_edges(8)
    states = trajectory(edges, 8, 5, order)
    for seed in range(2):
        programs = [(CALL, CALL, MEET, CALL, CALL, CALL, LEAVE)] * 8
        ended = run(world_of(edges, programs, order=order, **settings), random.Random(seed))
        ended.require_end()
        NEAR([rank.got for rank in ended.ranks], states[-1])


def test_weights_follow_the_ranks_that_send():
    """A graph whose W is not doubly stochastic: 1/|N_in(j)| is each column's, the star's."""
    edges = both_ways((0, rank) for rank in range(1, 5))
    ended = run(world_of(edges, [(CALL,) * 3] * 5), random.Random(0))
    NEAR([rank.got for rank in ended.ranks], trajectory(edges, 5, 3)[-1])


@pytest.mark.parametrize("make_edges", (graphs.ring, ring_based, directed_ring))
@pytest.mark.parametrize("max_gap, staleness", ((None, None), (3, None), (None, 0)))
def test_it_has_the_bits_of_d_psgd_on_a_regular_graph(make_edges, max_gap, staleness):
    size, programs = 8, [(CALL,) * 6] * 8
    edges = make_edges(size)
    matrix = graphs.mixing_matrix(edges, size)
    other = world_of(edges, programs)
    for number, rank in enumerate(other.ranks):
        sources = graphs.sources(edges, number)
        shares = [matrix[source, number] for source in sources]
        rank.attach(
            neighbor_average.NeighborAverageProtocol(
                rank.driven, number, size, sources, shares, matrix[number, number],
                graphs.destinations(edges, number), False,
            )
        )  # fmt: skip
    other = run(World(other.ranks, programs, change), random.Random(1))
    # With a staleness of 0 nothing from ahead may come in before its time.
    order = random.Random(2)
    if staleness == 0:
        world = in_step(world_of(edges, programs, max_gap=max_gap, staleness=staleness))
    else:
        world = run(world_of(edges, programs, max_gap=max_gap, staleness=staleness), order)
    assert iterations(world) == iterations(other) == [6] * size
    for one, another in zip(world.ranks, other.ranks):
        assert one.got.tobytes() == another.got.tobytes()


def in_step(world):
    """Let ranks act in turn, in the same iteration, what is sent before coming in between."""
    while events := world.events():
        deliveries = [event for event in events if len(event) == 2]
        behind = min(rank.protocol.calls for rank in world.ranks)
        acting = [event for event in events if len(event) == 1]
        due = [event for event in deliveries if world.channels[event][0].number <= behind]
        world = world.after((due or acting)[0])
    return world


def is_mean(staleness, kind):
    """Return a check of section 4.4's Equation 2, its own weight being s + 1; or of equal ones."""

    def check(before, world, rank):
        was = before.ranks[rank.number]
        k = was.protocol.calls
        require(all(len(kept) == 1 for kept in rank.kept.values()), "only the newest is kept")
        if rank.protocol.calls == k:
            return
        mixed = rank.mixed[len(was.mixed) :]
        require(not rank.kept, "what has come is used")
        require(len({source for source, *_ in mixed}) == len(mixed), "one of each rank")
        weights = [staleness + 1] + [number - (k - staleness) + 1 for _, number, *_ in mixed]
        require(min(weights) > 0, "what is too old is not used", weights)
        if kind == "simple":
            weights = [1] * len(weights)
        models = [was.model] + [value for *_, value, _ in mixed]
        mean = np.average(models, axis=0, weights=weights)
        own = world.change(rank.number, k)
        require(np.abs(rank.taken - mean - own).max() < 1e-12, "the mean", k)

    return check


@pytest.mark.parametrize("make_edges", (graphs.ring, ring_based, directed_ring))
@pytest.mark.parametrize("backup, kind", ((0, "weighted"), (1, "weighted"), (0, "simple")))
def test_bounded_staleness_is_the_mean_of_what_is_new(make_edges, backup, kind):
    edges, size = make_edges(8), 8
    ahead, gaps = 0, set()
    for seed in range(4):
        settings = {"max_gap": 5, "staleness": 3, "backup": backup, "mean": kind}
        world = world_of(edges, [(CALL,) * 30] * size, is_mean(3, kind), **settings)
        world = uneven(world, random.Random(seed), 700)
        for rank in world.ranks:
            gaps |= {number - k for _, number, _, k in rank.mixed}
        ahead += sum(len(rank.mixed) for rank in world.ranks)
    assert ahead > 50
    # Older ones, and such from ahead, were among them.
    assert min(gaps) < 0 < max(gaps)


@pytest.mark.parametrize("seed", range(6))
def test_backups_count_all_that_are_there_alike_and_drop_what_is_late(seed):
    size = 8
    edges = ring_based(size)

    def check(before, world, rank):
        was = before.ranks[rank.number]
        if rank.protocol.calls == was.protocol.calls:
            return
        mixed = rank.mixed[len(was.mixed) :]
        k = was.protocol.calls
        require({number for _, number, *_ in mixed} <= {k}, "of this iteration", k)
        require(len(mixed) >= 2, "all but one, with its own")
        mean = np.mean([was.model] + [value for *_, value, _ in mixed], axis=0)
        own = world.change(rank.number, k)
        require(np.abs(rank.taken - mean - own).max() < 1e-12, "each counts 1/n", k)
        numbers = [message.number for kept in rank.kept.values() for message in kept]
        require(all(number > k for number in numbers), "what is late is dropped", numbers)

    programs = [(CALL,) * 12] * size
    world = run(world_of(edges, programs, check, backup=1), random.Random(seed))
    world.require_end()
    assert iterations(world) == [12] * size
    sent = 13 * size * 3 - sum(rank.protocol.withheld for rank in world.ranks)
    used = sum(len(rank.mixed) for rank in world.ranks)
    kept = sum(len(kept) for rank in world.ranks for kept in rank.kept.values())
    assert sent == used + kept + sum(rank.protocol.dropped for rank in world.ranks)
    assert sum(rank.protocol.dropped for rank in world.ranks) > 0


def test_a_sender_looks_at_the_tokens_that_it_holds():
    """What its receiver has no use for is not sent: x_k where that is beyond k, or k + s."""
    edges = both_ways(((0, 1), (0, 2), (1, 2)))
    for settings, slack in (({"backup": 1}, 0), ({"backup": 1, "staleness": 2}, 2)):
        ended = reached(edges, 3, 5, max_gap=5, **settings)
        assert iterations(ended) == [0, 5, 5]
        ended.programs = [(CALL,) * 5] * 3
        ended = run(ended, random.Random(0))
        assert iterations(ended) == [5, 5, 5]
        # x_1 to x_4, of which the last ones are of use within the staleness.
        assert ended.ranks[0].protocol.withheld == 2 * (4 - slack)


# Skipping

TRIANGLE = both_ways(((0, 1), (0, 2), (1, 2)))


def behind(calls, seed=0, max_skip=10, **settings):
    """Return a world in which rank 0 has made so many calls, and the others all that they can."""
    world = world_of(TRIANGLE, [(CALL,) * 40] * 3, **settings)
    generator = random.Random(seed)
    for _ in range(calls):
        world = run_without(world.after((0,)), 0, generator)
    world = run_without(world, 0, generator)
    world.ranks[0].protocol.max_skip = max_skip
    return world


@pytest.mark.parametrize("seed", range(4))
def test_figure_10_b_a_straggler_jumps_to_where_tokens_have_stopped_the_others(seed):
    """max_ig = 5: A jumps from 5 to 10, averaging twice, and the others gain 5."""
    world = behind(5, seed, max_gap=5, backup=1)
    assert iterations(world) == [5, 10, 10]
    a = world.ranks[0]
    x = {(m.number, source): m.value for source, kept in a.kept.items() for m in kept}
    after = world.after((0,))
    assert iterations(after) == [10, 10, 10]
    assert after.ranks[0].protocol.skipped == 4
    # Recv(5), Reduce, Apply; then Recv(9) and Reduce, where its model counts as its own update.
    model = np.mean([a.model, x[5, 1], x[5, 2]], axis=0) + change(0, 5)
    NEAR(after.ranks[0].got, np.mean([model, x[9, 1], x[9, 2]], axis=0))
    assert iterations(run_without(after, 0, random.Random(seed))) == [10, 15, 15]


@pytest.mark.parametrize("seed", range(4))
def test_figure_10_a_a_straggler_jumps_to_where_staleness_has_stopped_the_others(seed):
    """s = 4: A jumps to 9, and the others resume."""
    world = behind(4, seed, max_gap=9, staleness=4)
    assert iterations(world) == [4, 9, 9]
    a = world.ranks[0]
    newest = [a.kept[source][0] for source in (1, 2)]
    after = world.after((0,))
    assert iterations(after) == [9, 9, 9]
    mean = np.average([a.model, *(m.value for m in newest)], axis=0, weights=(5, 10, 10))
    NEAR(after.ranks[0].got, mean + change(0, 4))
    assert iterations(run_without(after, 0, random.Random(seed))) == [9, 14, 14]


@pytest.mark.parametrize(
    "max_skip, skip_trigger, expected",
    ((0, 1, 6), (1, 1, 6), (2, 1, 7), (4, 1, 9), (5, 1, 10), (50, 1, 10), (9, 4, 10), (9, 5, 6)),
)
def test_a_jump_is_as_far_as_it_may_be(max_skip, skip_trigger, expected):
    world = behind(5, 0, max_skip, max_gap=5, backup=1, skip_trigger=skip_trigger)
    after = world.after((0,))
    assert iterations(after) == [expected, 10, 10]
    assert after.ranks[0].protocol.skipped == expected - 6


def test_a_jump_does_not_wait_for_who_may_wait_for_its_tokens():
    """Rank 1 gets as far as rank 0's tokens, rank 2 farther: it jumps as far as has come."""
    edges = frozenset(((0, 2), (2, 1), (1, 0), (2, 3), (3, 2)))
    world = world_of(edges, [(CALL,) * 40] * 4, max_gap=2, backup=1)
    world = run_without(world, 0, random.Random(0))
    assert iterations(world) == [0, 2, 4, 6]
    world.ranks[0].protocol.max_skip = 9
    # Its own update is enough by itself.
    assert iterations(world.after((0,))) == [3, 2, 4, 6]


@pytest.mark.parametrize("max_skip", (2, 10))
def test_who_skips_makes_fewer_calls_for_as_many_iterations(max_skip):
    """One rank is 6 times slower; the others get further for the same time."""
    farthest = {}
    for skips in (0, max_skip):
        edges = ring_based(8)
        settings = {"max_gap": 5, "backup": 1, "max_skip": skips}
        check = keeps_within(edges, 8, settings, None)
        world = world_of(edges, [(CALL,) * 200] * 8, check, **settings)
        for step in range(120):
            if step % 6 == 0 and (0,) in world.events():
                world = world.after((0,))
            for rank in range(1, 8):
                if (rank,) in world.events():
                    world = world.after((rank,))
            while deliveries := [event for event in world.events() if len(event) == 2]:
                world = world.after(deliveries[0])
        slow = world.ranks[0].protocol
        farthest[skips] = slow.calls, slow.calls - slow.skipped, max(iterations(world))
        assert (slow.skipped > 0) == (skips > 0)
    assert farthest[max_skip][1] <= farthest[0][1] + 1
    assert farthest[max_skip][0] >= 1.9 * farthest[0][0]
    assert farthest[max_skip][2] >= 1.7 * farthest[0][2]


# Ranks that leave, meet and join


@pytest.mark.parametrize("end", (LEAVE, MEET))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "settings",
    (
        {"max_gap": None},
        {"max_gap": 2},
        {"max_gap": 3, "staleness": 2},
        {"max_gap": None, "mode": "notify-ack"},
    ),
    ids=str,
)
def test_who_waits_for_a_rank_that_makes_no_calls_is_told(end, seed, settings):
    size = 6
    programs = [(CALL, MEET, *[CALL] * 60, LEAVE)] * size
    programs[1] = (CALL, MEET, CALL, end)
    ended = run(world_of(graphs.ring(size), programs, **settings), random.Random(seed))
    assert ended.ranks[1].stage in (Stage.ENDED, Stage.MEETS)
    assert all(2 <= rank.protocol.calls < 60 for rank in ended.ranks)
    assert all(rank.gave_up and rank.protocol.missing >= 0 for rank in ended.ranks[2:])


@pytest.mark.parametrize("seed", range(3))
def test_backups_do_without_a_rank_that_has_left_while_they_have_its_tokens(seed):
    programs = [(CALL,) * 40] * 6
    programs[0] = (CALL, LEAVE)
    ended = run(world_of(ring_based(6), programs, backup=1, max_gap=7), random.Random(seed))
    sources = graphs.sources(ring_based(6), 0)
    assert {iterations(ended)[rank] for rank in sources} == {8}
    assert {ended.ranks[rank].protocol.missing for rank in sources} == {0}
    # Rank 1 goes without one of them, not without both.
    programs[2] = programs[0]
    ended = run(world_of(ring_based(6), programs, backup=1, max_gap=7), random.Random(seed))
    assert iterations(ended)[1] == 2
    assert ended.ranks[1].gave_up and ended.ranks[1].protocol.missing in (0, 2)


@pytest.mark.parametrize("order", ("parallel", "serial"))
@pytest.mark.parametrize("settings", ({"max_gap": 1}, {"max_gap": None, "mode": "notify-ack"}))
def test_who_leaves_in_a_call_that_has_been_interrupted_owes_nobody_an_update(settings, order):
    settings = {**settings, "order": order}
    leaves = (CALL, INTERRUPTED, LEAVE)
    for programs in ([leaves, (CALL, CALL, LEAVE)], [leaves, leaves]):
        assert explore(world_of(graphs.ring(2), programs, **settings)) > 50
    programs = [leaves, leaves, *[(CALL, CALL, LEAVE)] * 4]
    for seed in range(20):
        run(world_of(ring_based(6), programs, **settings), random.Random(seed)).require_end()


class LeavesAtOnce(Protocol):
    """Sends no update once it leaves."""

    def owes(self):
        return False


def test_who_leaves_before_its_update_is_caught():
    programs = [(CALL, INTERRUPTED, LEAVE), (CALL, CALL, LEAVE)]
    settings = {"protocol": LeavesAtOnce, "max_gap": None, "mode": "notify-ack"}
    with pytest.raises(AssertionError, match="everybody comes to an end"):
        explore(world_of(graphs.ring(2), programs, **settings))


@pytest.mark.parametrize("order", ("parallel", "serial"))
@pytest.mark.parametrize("mode", ("standard", "notify-ack"))
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_have_joined_follow_the_recurrence_without_changes(mode, order, seed):
    generator = random.Random(seed)
    size = generator.randint(1, 6)
    counts = [generator.randrange(7) for _ in range(size)]
    programs = [(CALL,) * count + (JOIN, CALL, LEAVE) for count in counts]
    edges = graphs.ring(size)
    matrix, models = graphs.mixing_matrix(edges, size), start(size)
    max_gap = None if mode == "notify-ack" else generator.choice((None, 1, 3))
    for call in [*range(max(counts)), None]:
        if call is None:
            call, models = max(counts), np.tile(models.mean(axis=0), (size, 1))
            counts = [call + 1] * size
        made = np.array([[call < count] for count in counts])
        made = made * np.array([change(rank, call) for rank in range(size)])
        serial = order == "serial"
        models = matrix.T @ (models + made) if serial else matrix.T @ models + made
    world = world_of(edges, programs, max_gap=max_gap, mode=mode, order=order)
    ended = run(world, random.Random(seed))
    ended.require_end()
    assert iterations(ended) == [counts[0]] * size
    NEAR([rank.got for rank in ended.ranks], models)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@each_graph
def test_all_join_from_anywhere_with_every_setting(make_edges, seed):
    """Also where some have skipped; then they go on."""
    generator = random.Random(seed)
    size = 8
    edges = make_edges(size)
    for settings, ahead in SETTINGS.values():
        programs = [(CALL,) * generator.randrange(9) + (JOIN, CALL, LEAVE) for _ in range(size)]
        check = keeps_within(edges, size, settings, ahead)
        world = uneven(world_of(edges, programs, check, **settings), generator, 300)
        ended = run(world, generator)
        ended.require_end()
        if not settings.get("max_skip"):
            assert set(iterations(ended)) == {1 + max(map(len, programs)) - 3}


@pytest.mark.parametrize("name", ("backup", "skipping", "skipping, staleness"))
@pytest.mark.parametrize("together", (MEET, RESTART))
@each_graph
def test_all_meet_in_the_same_iteration_where_some_have_skipped(make_edges, together, name):
    """Nobody jumps past it, as there nobody does in whose place another waits."""
    size = 8
    edges = make_edges(size)
    settings, ahead = SETTINGS[name]
    programs = [(Until(9), together, Until(16), together, Until(18), LEAVE)] * size
    check = keeps_within(edges, size, settings, ahead)
    world = world_of(edges, programs, check, **settings)
    ended = run(uneven(world, random.Random(0), 1000, {(0,)}), random.Random(1))
    ended.require_end()
    assert iterations(ended) == [18] * size
    skipped = sum(rank.protocol.skipped for rank in ended.ranks)
    assert (skipped > 0) == (name != "backup")


@pytest.mark.parametrize(
    "settings, near",
    (({"staleness": 2, "order": "serial"}, 2), ({"backup": 1}, 3), ({"mode": "notify-ack"}, 1)),
    ids=str,
)
def test_nothing_counts_that_was_before_an_earlier_iteration_was_loaded(settings, near):
    settings = {"max_gap": None if "mode" in settings else 3, **settings}
    world = run(world_of(graphs.ring(6), [(CALL,) * 8] * 6, **settings), random.Random(0))
    for rank in world.ranks:
        rank.position = 0
        rank.driven.restart(1)
    for rank in world.ranks:
        world._collect(rank)
    world.programs = [(STOP,)] + [(CALL,) * 30] * 5
    again = iterations(run(world, random.Random(1)))
    first = iterations(reached(graphs.ring(6), 6, **settings))
    assert again == [1 + iteration for iteration in first]
    assert again[1] == again[5] == 1 + near


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, program, settings",
    (
        (2, (CALL, MEET, CALL, LEAVE), {"max_gap": 1}),
        (2, (CALL, CALL, CALL), {"max_gap": 2, "backup": 1, "max_skip": 2}),
        (2, (CALL, RESTART, CALL), {"max_gap": 2, "staleness": 1}),
        (2, (CALL, CALL, LEAVE), {"max_gap": None, "mode": "notify-ack"}),
        (2, (CALL, JOIN, CALL), {"max_gap": 1, "order": "serial"}),
        pytest.param(3, (CALL,), {"max_gap": 1, "backup": 1}, marks=pytest.mark.extra),
    ),
    ids=str,
)
def test_every_order_comes_to_an_end(size, program, settings):
    edges = graphs.ring(size)
    settings = {"max_gap": 5, **settings}
    ahead = {None: 1}.get(settings.get("backup"))
    ahead = ahead and settings.get("staleness", 0) + 1
    check = keeps_within(edges, size, settings, ahead)
    programs = [program] * size
    if settings.get("max_skip"):
        programs[0] = (CALL,)
    assert explore(world_of(edges, programs, check, **settings)) > 50
