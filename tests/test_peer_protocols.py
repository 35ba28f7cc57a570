"""Vectors sent from rank to rank: the protocols' sources against the mathematics, without MPI."""

import functools
import itertools
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
    Chosen,
    Parts,
    Rank,
    Stage,
    Violation,
    World,
    connected_graphs,
    explore,
    neighbor_average,
    pairs,
    pairwise_average,
    parameter_server,
    peers,
    push_sum,
    require,
    run,
)

from collectives import graphs

LENGTH = 3
NEAR = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)


def is_near(one, other):
    return np.abs(one - other).max() < 1e-11


def change(rank, call):
    """What a rank's application changes in a call: float64 array of shape (LENGTH,)."""
    return np.random.default_rng([rank, call]).standard_normal(LENGTH)


def changes(size, call):
    return np.array([change(rank, call) for rank in range(size)])


def start(size):
    return np.array([np.random.default_rng(rank).standard_normal(LENGTH) for rank in range(size)])


def world_of(make, programs, check=None, change=change, rank_type=Rank, world_type=World):
    """Return a world of the protocols that `make` returns for (port, rank, size)."""
    size = len(programs)
    ranks = [rank_type(number, model) for number, model in enumerate(start(size))]
    for number, rank in enumerate(ranks):
        rank.attach(make(rank.driven, number, size))
    return world_type(ranks, programs, change, check)


def run_to_the_end(world, seed):
    ended = run(world, random.Random(seed))
    ended.require_end()
    return ended


# D-PSGD


def neighbors(edges, size, clock="neighbors", matrix=None, protocol=None):
    """Return what makes D-PSGD's protocols, and the matrix W."""
    matrix = graphs.mixing_matrix(edges, size) if matrix is None else matrix

    def make(port, rank, size):
        sources = graphs.sources(edges, rank)
        return (protocol or neighbor_average.NeighborAverageProtocol)(
            port,
            rank,
            size,
            sources,
            [matrix[source, rank] for source in sources],
            matrix[rank, rank],
            graphs.destinations(edges, rank),
            clock == "global",
        )

    return make, matrix


def trajectory(matrix, calls, restart=None):
    """Return x_0, x_1, …, each of shape (size, LENGTH), with x_{k+1} = W^T x_k + change."""
    size = len(matrix)
    states = [start(size)]
    for call in range(calls):
        models = states[-1]
        if call == restart:
            models = np.tile(models.mean(axis=0), (size, 1))
        states.append(matrix.T @ models + changes(size, call))
    return states


def follows(states, distances, clock):
    """Return a check that all ranks are on this trajectory, none too far ahead of another."""

    def check(before, world, rank):
        if rank.taken is not None:
            expected = states[rank.protocol.calls][rank.number]
            require(is_near(rank.taken, expected), "D-PSGD's recurrence", rank.number)
        for other in world.ranks:
            begun = other.protocol.calls + other.protocol.calling
            ahead = rank.protocol.calls - other.protocol.calls
            require(ahead <= distances[other.number][rank.number], "near", ahead)
            require(clock == "neighbors" or rank.protocol.calls <= begun, "together", ahead)

    return check


def distances(edges, size):
    """Return how many edges it takes from one rank to another: array of shape (size, size)."""
    far = np.full((size, size), 10**6)
    for a, b in edges:
        far[a, b] = 1
    far[np.diag_indices(size)] = 0
    for k in range(size):
        far = np.minimum(far, far[:, [k]] + far[[k], :])
    return far


def random_digraph(size, generator):
    """Return the edges and a doubly stochastic matrix of some permutations, one a cycle."""
    order = generator.sample(range(size), size)
    matrix = np.eye(size) * 0.25
    for i in range(size):
        matrix[order[i], order[(i + 1) % size]] += 0.25
    for _ in range(2):
        for rank, image in enumerate(generator.sample(range(size), size)):
            matrix[rank, image] += 0.25
    return {(int(a), int(b)) for a, b in np.argwhere(matrix) if a != b}, matrix


@pytest.mark.parametrize("clock", ("neighbors", "global"))
@pytest.mark.parametrize("seed", range(12))
def test_d_psgd_is_its_recurrence_whatever_the_order(clock, seed):
    generator = random.Random(seed)
    size = generator.randint(1, 9)
    edges, matrix = graphs.ring(size), None
    if seed % 2:
        edges, matrix = random_digraph(size, generator)
    make, matrix = neighbors(edges, size, clock, matrix)
    restart = generator.choice((None, 1, 3))
    program = [CALL] * 6
    if restart is not None:
        program.insert(restart, RESTART)
    program.insert(2, MEET)
    states = trajectory(matrix, 6, restart)
    check = follows(states, distances(edges, size), clock)
    ended = run_to_the_end(world_of(make, [(*program, LEAVE)] * size, check), seed)
    assert [rank.protocol.calls for rank in ended.ranks] == [6] * size
    NEAR([rank.got for rank in ended.ranks], states[-1])


@pytest.mark.parametrize("clock", ("neighbors", "global"))
def test_d_psgd_waits_for_nobody_else_and_gets_as_far_as_the_graph_allows(clock):
    size = 9
    make, _ = neighbors(graphs.ring(size), size, clock)
    ended = run(world_of(make, [(STOP,)] + [(CALL,) * 9] * (size - 1)), random.Random(0))
    far = distances(graphs.ring(size), size)[0]
    expected = [0] * size if clock == "global" else far.tolist()
    assert [rank.protocol.calls for rank in ended.ranks] == expected


@pytest.mark.parametrize("size, program", ((2, (CALL, MEET, CALL, LEAVE)), (3, (CALL,))))
def test_d_psgd_in_every_order(size, program):
    make, matrix = neighbors(graphs.ring(size), size)
    states = trajectory(matrix, program.count(CALL))
    check = follows(states, distances(graphs.ring(size), size), "neighbors")
    assert explore(world_of(make, [program] * size, check)) > 50


def gives_up_in_order(make, size, seed, end):
    """Let rank 1 leave, or meet the others, after two calls, and return the world in the end."""
    programs = [(CALL, MEET, *[CALL] * 8, LEAVE)] * size
    programs[1] = (CALL, MEET, CALL, end)
    ended = run(world_of(make, programs), random.Random(seed))
    assert ended.ranks[1].stage in (Stage.ENDED, Stage.MEETS)
    assert all(rank.protocol.calls >= 2 for rank in ended.ranks)
    assert all(rank.gave_up and rank.protocol.missing >= 0 for rank in ended.ranks[2:])
    return ended


@pytest.mark.parametrize("clock", ("neighbors", "global"))
@pytest.mark.parametrize("end", (LEAVE, MEET))
@pytest.mark.parametrize("seed", range(5))
def test_d_psgd_tells_who_waits_for_a_rank_that_makes_no_calls(clock, end, seed):
    make, _ = neighbors(graphs.ring(6), 6, clock)
    ended = gives_up_in_order(make, 6, seed, end)
    for rank in ended.ranks:
        far = 0 if clock == "global" else distances(graphs.ring(6), 6)[1, rank.number]
        assert rank.protocol.calls == 2 + far


# Push-sum


def pushing(size, neighbors=None, edges=None, weights=None, protocol=push_sum.PushSumProtocol):
    phases = [edges] if edges else graphs.exponential_phases(size, neighbors)

    def make(port, rank, size):
        return protocol(
            port,
            rank,
            size,
            [graphs.destinations(edges, rank) for edges in phases],
            [graphs.sources(edges, rank) for edges in phases],
            weights[rank] if weights is not None else 1.0,
        )

    return make, phases


def sums_stay(weights):
    """Return a check that Σx is what was put in and Σw what it was, with messages under way."""
    weights = np.asarray(weights)
    expected = (weights[:, None] * start(len(weights))).sum(axis=0)

    def check(before, world, rank):
        total = sum(each.model - each.published for each in world.ranks)
        total = total + sum(
            message.value for message in world.messages() if message.value is not None
        )
        require(is_near(total, expected), "Σx stays", total)
        mass = sum(each.protocol.weight for each in world.ranks)
        mass += sum(message.weight for message in world.messages())
        require(abs(mass - weights.sum()) < 1e-10, "Σw stays", mass)

    return check


def is_apart(rank, call):
    """Changes in the first two calls only."""
    return change(rank, call) * (call < 2)


@pytest.mark.parametrize("size", (1, 2, 3, 4, 5, 8, 12))
@pytest.mark.parametrize("count", (1, 2, 4))
def test_push_sum_reaches_the_weighted_mean_and_loses_nothing(size, count):
    most = max((size - 1).bit_length(), 1)
    weights = 0.5 + np.arange(size) % 3
    make, phases = pushing(size, min(count, most), weights=weights)
    exactly = size & (size - 1) == 0 and count == 1
    calls = 2 + len(phases) if exactly else 20
    programs = [(CALL,) * calls + (MEET, LEAVE)] * size
    ended = run_to_the_end(world_of(make, programs, sums_stay(weights), is_apart), size)
    total = (weights[:, None] * start(size)).sum(axis=0)
    total += sum(is_apart(rank, call) for rank in range(size) for call in range(2))
    expected = np.tile(total / weights.sum(), (size, 1))
    # With as many ranks as powers of two allow, one round of all phases is an exact average.
    tolerance = 1e-12 if exactly else 1e-3
    np.testing.assert_allclose([rank.got for rank in ended.ranks], expected, atol=tolerance)


@pytest.mark.parametrize("seed", range(6))
def test_push_sum_on_a_digraph_of_any_degrees(seed):
    generator = random.Random(seed)
    size = generator.randint(2, 7)
    cycle = {(rank, (rank + 1) % size) for rank in range(size)}
    more = {tuple(generator.sample(range(size), 2)) for _ in range(size)}
    weights = [generator.choice((0.25, 1.0, 3.0)) for _ in range(size)]
    make, _ = pushing(size, edges=cycle | more, weights=weights)
    # A restart sets out from the mean with the first weights again.
    programs = [((CALL,) * 30 + (MEET,)) * 2 + (RESTART, CALL, LEAVE)] * size
    restarts = sums_stay(weights)

    def check(before, world, rank):
        if max(each.epoch for each in world.ranks) == 0:
            restarts(before, world, rank)

    ended = run_to_the_end(world_of(make, programs, check, is_apart), seed)
    total = (np.array(weights)[:, None] * start(size)).sum(axis=0)
    total += sum(is_apart(rank, call) for rank in range(size) for call in range(2))
    for rank in ended.ranks:
        assert rank.protocol.calls == 61
        np.testing.assert_allclose(rank.got, total / sum(weights), atol=1e-5)


def test_push_sum_in_every_order():
    make, _ = pushing(2, 1)
    programs = [(CALL, MEET, CALL, LEAVE)] * 2
    assert explore(world_of(make, programs, sums_stay([1.0, 1.0]))) > 50


@pytest.mark.parametrize("end", (LEAVE, MEET))
@pytest.mark.parametrize("seed", range(5))
def test_push_sum_tells_who_waits_for_a_rank_that_makes_no_calls(end, seed):
    make, _ = pushing(6, 1)
    gives_up_in_order(make, 6, seed, end)


# Pairs

SHAPES = {
    "path": (4, ((0, 1), (1, 2), (2, 3))),
    "star": (4, ((0, 3), (1, 3), (2, 3))),
    "paw": (4, ((0, 1), (0, 2), (1, 2), (2, 3))),
    "square": (4, ((0, 1), (1, 2), (2, 3), (0, 3))),
    "diamond": (4, ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3))),
    "all four": (4, tuple(itertools.combinations(range(4), 2))),
}


def both_ways(edges):
    return frozenset(edges) | {(b, a) for a, b in edges}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_order_of_pairs_of_four_ranks_comes_to_an_end(shape):
    """`python -m tests.peer_network --ranks 4` has all numberings, and more calls."""
    size, edges = SHAPES[shape]
    assert Parts(pairs(both_ways(edges), ((CALL,),) * size)).explore() > 1000


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize(
    "program",
    ((CALL, CALL, LEAVE), (CALL, MEET, LEAVE), (CALL, RESTART, CALL)),
    ids=lambda program: "-".join(program),
)
def test_every_order_of_pairs_that_leave_meet_or_begin_anew(size, program):
    if size == 3 and program[1] == CALL:
        program = (CALL, LEAVE)
    for edges in connected_graphs(size):
        assert Parts(pairs(edges, (program,) * size)).explore() > len(program)


def test_parts_are_as_good_as_the_whole():
    """Also with the vectors at hand, whose sum is then that of the changes."""
    for edges in connected_graphs(3):
        world = pairs(edges, ((CALL, LEAVE), (CALL,), (LEAVE,)))
        assert explore(world) == Parts(world).explore()


@pytest.mark.parametrize("seed", range(15))
def test_pairs_of_many_ranks_average_and_lose_nothing(seed):
    """On connected graphs, drawn; one rank stops for ever, without leaving."""
    generator = random.Random(seed)
    size = generator.randint(5, 16)
    tree = {(rank, generator.randrange(rank)) for rank in range(1, size)}
    more = {tuple(generator.sample(range(size), 2)) for _ in range(generator.randint(0, 2 * size))}
    programs = [(CALL,) * generator.randint(0, 8) for _ in range(size)]
    together = generator.choice((None, MEET, RESTART))
    if together:
        programs = [(CALL, CALL, together, *program, LEAVE) for program in programs]
    else:
        programs[0] = (CALL, STOP)
    world = pairs(both_ways(tree | more), programs, pairwise_average.PairwiseAverageProtocol, seed)
    ended = run_to_the_end(world, seed)
    calls = sum(rank.protocol.calls for rank in ended.ranks)
    averaged = sum(rank.protocol.averagings - rank.protocol.passive for rank in ended.ranks)
    missed = sum(rank.protocol.missed for rank in ended.ranks)
    assert sum(rank.protocol.passive for rank in ended.ranks) == averaged
    assert averaged <= calls
    if not together:
        assert averaged + missed == calls


def test_pairs_come_together():
    """Without changes, all tend to the mean of what they had, on a graph that is not bipartite."""
    size = 5
    world = pairs(
        graphs.ring(size), ((CALL,) * 99,) * size, pairwise_average.PairwiseAverageProtocol, 1
    )
    world.change = lambda rank, call: 0
    ended = run(world, random.Random(1))
    models = np.array([float(rank.model) for rank in ended.ranks])
    NEAR(models.mean(), sum(3.0**rank for rank in range(size)) / size)
    assert np.ptp(models) < 1e-2


# The parameter server


MOMENTUM, RATE = 0.9, 0.7
each_mode = pytest.mark.parametrize(
    "mode, backups",
    (("bsp", 0), ("backup", 1), ("asp", 0), ("hete", 0), ("ringmaster", 0), ("async-local", 0)),
)


def served(mode, server=0, backups=0, protocol=parameter_server.ParameterServerProtocol, max_age=1):
    outer = MOMENTUM, RATE
    return lambda port, rank, size: protocol(
        port, rank, size, mode, server, backups, max_age, *outer
    )


def synchronous(size, server, calls):
    """Return the models of synchronous SGD: a step is the mean of all changes."""
    states = [start(size)[server]]
    for call in range(calls):
        states.append(states[-1] + changes(size, call).mean(axis=0))
    return states


def is_synchronous(states):
    def check(before, world, rank):
        if rank.taken is not None:
            require(
                is_near(rank.taken, states[rank.protocol.calls]),
                "bsp is synchronous SGD",
                rank.number,
                rank.protocol.calls,
            )

    return check


def test_the_server_tells_each_rank_how_fast_the_fastest_one_is():
    def make(port, rank, size):
        made = served("async-local")(port, rank, size)
        made.speed = (2.0, 0.5, 4.0, 0.0)[rank]
        return made

    world = world_of(make, [(CALL, CALL, LEAVE)] * 4, lambda *state: None)
    assert [rank.protocol.steps_beside(8) for rank in world.ranks] == [8] * 4
    ranks = [rank.protocol for rank in run_to_the_end(world, 0).ranks]
    assert max(rank.fastest for rank in ranks) == ranks[2].fastest == 4
    ranks[1].fastest = 4
    assert [rank.steps_beside(8) for rank in ranks[1:]] == [1, 8, 8]  # the last one's is unknown
    assert ranks[1].steps_beside(7) == 1


def test_the_server_knows_the_highest_of_all_ranks_newest_speeds():
    server = served("async-local")(None, 0, 5)
    drawn = random.Random(0)
    newest = [0] * 5
    for _ in range(200):
        rank = drawn.randrange(5)
        newest[rank] = drawn.choice((0, 1.0, 2.0, 3.5))
        server.note_speed(rank, newest[rank])
        assert server.highest == max(newest)


@pytest.mark.parametrize("seed", range(8))
def test_bsp_is_synchronous_sgd(seed):
    generator = random.Random(seed)
    size = generator.randint(1, 7)
    server = generator.randrange(size)
    program = (CALL, CALL, MEET, CALL, CALL, MEET, RESTART, CALL, LEAVE)
    states = synchronous(size, server, 5)
    world = world_of(served("bsp", server), [program] * size, is_synchronous(states))
    ended = run_to_the_end(world, seed)
    assert [rank.protocol.calls for rank in ended.ranks] == [5] * size
    assert not any(rank.protocol.dropped for rank in ended.ranks)


@pytest.mark.parametrize(
    "size, program",
    ((2, (CALL, MEET, CALL, LEAVE)), (3, (CALL, LEAVE)), (3, (MEET, CALL))),
)
def test_bsp_is_synchronous_sgd_in_every_order(size, program):
    calls = program.count(CALL)
    check = is_synchronous(synchronous(size, 0, calls))
    assert explore(world_of(served("bsp"), [program] * size, check)) > 10


def rounds_of(protocol, backups, size):
    """Return a check that only whole rounds end where nobody is away, and what counts is right."""

    def check(before, world, rank):
        master, earlier = world.ranks[0], before.ranks[0]
        if master.protocol.version > earlier.protocol.version and master.epoch == earlier.epoch:
            absent = [
                each for each in world.ranks if each.stage not in (Stage.COMPUTES, Stage.WAITS)
            ]
            require(
                absent or earlier.protocol.came + 1 == size - backups, "a round is whole", rank.key
            )

    return check


@pytest.mark.parametrize("seed", range(10))
def test_backups_end_rounds_with_all_but_b_and_count_what_they_drop(seed):
    generator = random.Random(seed)
    size = generator.randint(2, 7)
    backups = generator.randrange(size)
    program = (CALL,) * 5 + (MEET,) + (CALL,) * 3 + (generator.choice((MEET, RESTART)), CALL, LEAVE)
    make = served("backup", 0, backups)
    world = world_of(make, [program] * size, rounds_of(make, backups, size))
    ended = run_to_the_end(world, seed)
    master = ended.ranks[0].protocol
    assert [rank.protocol.calls for rank in ended.ranks] == [9] * size
    assert master.averagings + master.dropped == 9 * size
    assert master.dropped <= 9 * backups * 2 and (backups or not master.dropped)


def test_a_backup_that_stops_holds_up_nobody_and_more_do():
    for stopped, calls in ((1, 6), (2, 0)):
        programs = [(CALL,) * 6] * (5 - stopped) + [(STOP,)] * stopped
        ended = run(world_of(served("backup", 0, 1), programs), random.Random(3))
        assert [rank.protocol.calls for rank in ended.ranks] == [calls] * (5 - stopped) + [
            0
        ] * stopped
        # Each of those that ran counts 1/4.
        expected = start(5)[0] + sum(changes(4, call).mean(axis=0) for call in range(calls))
        NEAR(ended.ranks[0].got, expected)


def test_a_round_waits_for_the_others_of_a_rank_that_leaves_with_its_change_in_it():
    """An exception has ended the call of rank 1, or of the server, rank 0."""
    for leaves in (1, 0):
        server, *_ = world_of(served("bsp"), [(CALL,)] * 3).ranks
        message = server.message(parameter_server.PUSH, 0, 0, 0, change(1, 0))
        server.kept = {1: (message,), 2: (message,)}
        server.protocol.arrived(1, parameter_server.PUSH, 0, 0)
        server.driven.call()
        if leaves:
            server.protocol.arrived(1, peers.LEAVE, 1, 0)
        else:
            server.protocol.leave(failed=False)
        assert server.protocol.version == 0
        server.protocol.arrived(2, parameter_server.PUSH, 0, 0)
        assert (server.protocol.version, server.protocol.dropped) == (1, 0)


def test_a_server_that_is_late_to_go_on_does_not_wait_for_who_is_away_again():
    programs = [(MEET, CALL, CALL, CALL, MEET, LEAVE)] * 3
    world = world_of(served("backup", 0, 1), programs)
    while events := world.events():
        world = world.after(min(events, key=lambda event: event == (0,)))
    world.require_end()


@pytest.mark.parametrize("seed", range(8))
def test_asp_and_hete_answer_each_change_at_once(seed):
    generator = random.Random(seed)
    size = generator.randint(1, 6)
    server = generator.randrange(size)
    programs = [(CALL,) * generator.randint(0, 7) for _ in range(size)]
    ends = [(LEAVE,), (STOP,)]
    programs = [(*program, *generator.choice(ends)) for program in programs]
    ended = run(world_of(served("asp", server), programs), generator)
    made = sum(program.count(CALL) for program in programs)
    total = sum(change(r, call) for r in range(size) for call in range(programs[r].count(CALL)))
    assert [rank.protocol.calls for rank in ended.ranks] == [p.count(CALL) for p in programs]
    assert ended.ranks[server].protocol.version == made
    NEAR(ended.ranks[server].model, start(size)[server] + total / size)


def test_hete_weighs_a_change_by_the_rounds_that_it_is_old():
    """Rank 1's change is made on the first model; the server has made 0 to 5 of its own since."""
    for since in range(6):
        world = world_of(served("hete"), [(CALL,) * since, (CALL,)])
        (sent,) = [world.after((1,))]
        for _ in range(since):
            sent = sent.after((0,))
        sent = sent.after((1, 0))
        own = sum((change(0, call) for call in range(since)), np.zeros(LENGTH)) / 2
        NEAR(sent.ranks[0].model, start(2)[0] + own + change(1, 0) / 2 / (1 + since // 2))
        assert sent.ranks[0].protocol.version == since + 1


def absorbed(before, world, rank):
    """Return the rank whose change has arrived at the server, rank 0, in this event; or None."""
    if rank.number != 0:
        return None
    for (source, _), sent in before.channels.items():
        if sent[0].kind == parameter_server.PUSH and sent != world.channels.get((source, 0)):
            return source
    return 0 if rank.taken is not None else None


def drops_by_age(max_age):
    """Return a check that what is too old never enters rank 0's model, and all else does.

    The age of a change is the number of models that rank 0 has had since the one of its rank.
    """

    def check(before, world, rank):
        earlier, master = before.ranks[0], world.ranks[0]
        had = getattr(before, "had", (earlier.model,))
        source = absorbed(before, world, rank)
        if source is not None:
            caller = before.ranks[source]
            newest = [number for number, model in enumerate(had) if is_near(model, caller.got)]
            age = len(had) - 1 - max(newest, default=0)
            entered = world.change(source, caller.protocol.calls) / len(world.ranks)
            entered = entered * (age < max_age)
            what = "what is too old is dropped, and nothing else"
            require(is_near(master.model, earlier.model + entered), what, source, age)
            dropped = master.protocol.dropped - earlier.protocol.dropped
            require(dropped == (age >= max_age), "what is dropped is counted", source, age)
        world.had = had if master.model is earlier.model else (*had, master.model)

    return check


@pytest.mark.parametrize("seed", range(8))
def test_ringmaster_drops_what_is_too_old_and_nothing_else(seed):
    generator = random.Random(seed)
    size, max_age = generator.randint(1, 6), generator.randint(1, 5)
    end = generator.choice(((LEAVE,), (MEET, CALL, LEAVE), (RESTART, CALL, CALL, LEAVE)))
    programs = [(CALL,) * generator.randint(0, 7) + end for _ in range(size)]
    make = served("ringmaster", max_age=max_age)
    ended = run_to_the_end(world_of(make, programs, drops_by_age(max_age)), seed)
    if RESTART not in end:
        master, made = ended.ranks[0].protocol, sum(program.count(CALL) for program in programs)
        assert master.version + master.dropped == made
        assert [rank.protocol.calls for rank in ended.ranks] == [p.count(CALL) for p in programs]


@pytest.mark.parametrize("max_age", (1, 2, 3))
def test_ringmaster_drops_what_is_too_old_in_every_order(max_age):
    check = drops_by_age(max_age)
    for programs in (
        [(CALL, CALL, MEET, CALL), (CALL, CALL, MEET, CALL)],
        [(CALL, RESTART, CALL), (CALL, CALL, RESTART, CALL)],
        [(CALL, CALL, LEAVE), (CALL, CALL, LEAVE), (CALL, LEAVE)],
    ):
        assert explore(world_of(served("ringmaster", max_age=max_age), programs, check)) > 10


def follows_nesterov(before, world, rank):
    """Check that rank 0's model has all changes, and after each round Nesterov's momentum."""
    source, size = absorbed(before, world, rank), len(world.ranks)
    momentum, gathered, count = getattr(before, "outer", (0, 0, 0))
    if source is not None:
        change = world.change(source, before.ranks[source].protocol.calls) / size
        expected = before.ranks[0].model + RATE * change
        gathered, count = gathered + change, count + 1
        if count % size == 0:
            momentum, gathered = MOMENTUM * momentum + gathered, 0
            expected = expected + RATE * MOMENTUM * momentum
        require(is_near(world.ranks[0].model, expected), "momentum is delayed", source, count)
    if world.ranks[0].epoch != before.ranks[0].epoch:
        momentum, gathered, count = 0, 0, 0
    world.outer = momentum, gathered, count


@pytest.mark.parametrize("seed", range(8))
def test_momentum_is_applied_after_as_many_changes_as_there_are_ranks(seed):
    generator = random.Random(seed)
    size = generator.randint(1, 6)
    end = generator.choice(((LEAVE,), (MEET, CALL, LEAVE), (RESTART, CALL, CALL, LEAVE)))
    programs = [(CALL,) * generator.randint(0, 7) + end for _ in range(size)]
    run_to_the_end(world_of(served("async-local"), programs, follows_nesterov), seed)


@pytest.mark.parametrize(
    "programs",
    (
        [(CALL, CALL, CALL, MEET, CALL), (CALL, CALL, MEET, CALL)],
        [(CALL, RESTART, CALL, CALL), (CALL, CALL, RESTART, CALL)],
        [(CALL, CALL, LEAVE), (CALL, CALL, LEAVE), (CALL, LEAVE)],
    ),
)
def test_momentum_is_applied_in_every_order(programs):
    assert explore(world_of(served("async-local"), programs, follows_nesterov)) > 10


@pytest.mark.parametrize("joins", (0, 1))
def test_what_is_handed_in_counts_whole_and_has_no_momentum(joins):
    """Momentum starts again with it; only the other rank makes calls."""
    caller = 1 - joins

    def after_call(world):
        world = world.after((caller,))
        return world.after((1, 0)).after((0, 1)) if caller else world

    world = world_of(served("async-local"), [(CALL,) * 9] * 2)
    for _ in range(2):
        world = after_call(world)
    rank = world.ranks[joins]
    rank.change(change(joins, 9))
    expected = world.ranks[0].model + change(joins, 9) / 2
    rank.driven.hand_in()
    world._collect(rank)
    if joins:
        world = world.after((1, 0)).after((0, 1))
    NEAR(world.ranks[0].model, expected)
    for _ in range(2):
        world = after_call(world)
    made = (change(caller, 2) + change(caller, 3)) / 2
    NEAR(world.ranks[0].model, expected + RATE * (1 + MOMENTUM) * made)


@each_mode
def test_no_order_lets_a_rank_that_leaves_or_pauses_hold_up_others(mode, backups):
    programs = [(CALL, MEET, CALL, LEAVE), (CALL, MEET, LEAVE)]
    assert Parts(world_of(served(mode, 0, backups), programs)).explore() > 20
    programs = [(LEAVE,), (CALL, CALL, LEAVE), (CALL, LEAVE)]
    assert Parts(world_of(served(mode, 0, backups), programs)).explore() > 20


# Leaving, after an exception has ended a call

BY_ONE = (INTERRUPTED, LEAVE)
ENDED_CALLS = (
    [BY_ONE, (CALL, LEAVE), (CALL, LEAVE)],
    [BY_ONE, BY_ONE, (CALL, LEAVE)],
    [BY_ONE] * 3,
    [(CALL, INTERRUPTED, LEAVE), (CALL, CALL, LEAVE)],
    [(CALL, INTERRUPTED, LEAVE)] * 2,
)


def of_each_kind(size):
    """Yield what makes the protocols of each kind in which calls wait."""
    for clock in ("neighbors", "global"):
        yield neighbors(graphs.ring(size), size, clock)[0]
    yield pushing(size, 1)[0]
    yield from map(served, ("bsp", "asp", "hete", "ringmaster", "async-local"))


@pytest.mark.parametrize("programs", ENDED_CALLS)
def test_a_rank_leaves_once_it_owes_nobody_anything(programs):
    """So nobody waits for what it would have sent in the call, and that comes to an end."""
    for make in of_each_kind(len(programs)):
        for order in {tuple(programs), tuple(programs[::-1])}:
            assert Parts(world_of(make, order)).explore() > 10


class GivenUp(World):
    """Ranks that are told that they wait in vain."""

    def require_end(self):
        departing = any(rank.protocol.departing for rank in self.ranks)
        require(self.has_ended() and not self.channels and not departing, "everybody is told")


@pytest.mark.parametrize(
    "programs",
    (
        [BY_ONE, (CALL, LEAVE), (LEAVE,)],
        [BY_ONE, BY_ONE, (LEAVE,)],
        [BY_ONE, (LEAVE,), (LEAVE,)],
        [(CALL, INTERRUPTED, LEAVE), (CALL, LEAVE)],
        [(CALL, INTERRUPTED, LEAVE), (LEAVE,)],
    ),
)
def test_a_rank_that_owes_what_it_cannot_send_leaves_all_the_same(programs):
    for make in of_each_kind(len(programs)):
        for order in (programs, programs[::-1]):
            assert Parts(world_of(make, order, world_type=GivenUp)).explore() > 5


@pytest.mark.parametrize("server", (0, 1))
def test_a_round_has_the_changes_of_all_where_one_leaves_in_it(server):
    for programs in ENDED_CALLS[:2]:
        for order in (programs, programs[::-1]):
            check = is_synchronous(synchronous(3, server, 1))
            assert explore(world_of(served("bsp", server), order, check)) > 10


# Joining, after different numbers of calls


def joining(generator, size):
    """Return programs of 0 to 6 calls before all join, and one call after that."""
    counts = [generator.randrange(7) for _ in range(size)]
    return counts, [(CALL,) * count + (JOIN, CALL, LEAVE) for count in counts]


@pytest.mark.parametrize("clock", ("neighbors", "global"))
@pytest.mark.parametrize("seed", range(4))
def test_ranks_of_d_psgd_that_have_joined_follow_the_recurrence_without_changes(clock, seed):
    generator = random.Random(seed)
    size = generator.randint(1, 6)
    counts, programs = joining(generator, size)
    make, matrix = neighbors(graphs.ring(size), size, clock)
    models = start(size)
    for call in range(max(counts)):
        made = np.array([[call < count] for count in counts])
        models = matrix.T @ models + made * changes(size, call)
    ended = run_to_the_end(world_of(make, programs), seed)
    assert [rank.protocol.calls for rank in ended.ranks] == [max(counts) + 1] * size
    models = matrix.T @ np.tile(models.mean(axis=0), (size, 1)) + changes(size, max(counts))
    NEAR([rank.got for rank in ended.ranks], models)


@pytest.mark.parametrize("seed", range(4))
def test_push_sum_loses_nothing_where_ranks_join(seed):
    generator = random.Random(seed)
    size = generator.randint(1, 6)
    counts, programs = joining(generator, size)
    make, _ = pushing(size, 1)
    ended = run_to_the_end(world_of(make, [program[:-2] for program in programs]), seed)
    total = start(size).sum(axis=0) + sum(
        change(rank, call) for rank, count in enumerate(counts) for call in range(count)
    )
    NEAR([rank.model for rank in ended.ranks], np.tile(total / size, (size, 1)))


@each_mode
@pytest.mark.parametrize("seed", range(2))
def test_nobody_waits_for_a_rank_that_has_joined_a_parameter_server(mode, backups, seed):
    generator = random.Random(seed)
    counts, programs = joining(generator, 4)
    ended = run_to_the_end(world_of(served(mode, 1, backups), programs), seed)
    assert [rank.protocol.calls for rank in ended.ranks] == [max(counts) + 1] * 4


def test_every_order_of_pairs_that_join():
    for edges in connected_graphs(3):
        assert Parts(pairs(edges, ((CALL, JOIN), (JOIN,), (CALL, JOIN)))).explore() > 10


# Wrong variants are caught.


class LowerRanksToo(Chosen):
    """Nobody is refused who asks one that asks."""

    def received(self, source, kind, number, weight):
        asking = kind == pairwise_average.ASK and self.state == pairwise_average.ASKING
        super().received(self.rank if asking and source > self.rank else source, kind, 0, 0)
        if asking and source > self.rank:
            last = (self.first_waiting + self.count_waiting - 1) % self.size
            self.waiting[last] = source


class GrantsWhileAsking(Chosen):
    """Who asks grants averages all the same."""

    def received(self, source, kind, number, weight):
        if kind == pairwise_average.ASK and self.state == pairwise_average.ASKING:
            self.port.write_model(pairwise_average.GRANT, self.calls, 0)
            self.port.post(source)
        else:
            super().received(source, kind, number, weight)


class GrantsWhileGranted(Chosen):
    """One average begins before the last one's end."""

    def received(self, source, kind, number, weight):
        if kind == pairwise_average.ASK and self.state == pairwise_average.GRANTED:
            self.port.write_model(pairwise_average.GRANT, self.calls, 0)
            self.port.post(source)
        else:
            super().received(source, kind, number, weight)


class TakesTheMean(Chosen):
    """Who is sent half of the difference takes it for the mean."""

    def received(self, source, kind, number, weight):
        if kind == pairwise_average.HALF:
            self.port.mix(source, 0, 1)
            self.state = pairwise_average.FREE
        else:
            super().received(source, kind, number, weight)


class ForgetsWhoWaits(Chosen):
    """Who has got its half grants no other average until the next event."""

    def advance(self):
        if not (self.state == pairwise_average.FREE and self.averagings and self.count_waiting):
            super().advance()


class AsksForEver(Chosen):
    """A refusal does not count."""

    def received(self, source, kind, number, weight):
        self.attempts += kind == pairwise_average.REFUSE
        super().received(source, kind, number, weight)


@pytest.mark.parametrize(
    "mutant, what",
    (
        (LowerRanksToo, "everybody comes to an end"),
        (GrantsWhileAsking, "a pair is averaged in one step"),
        (GrantsWhileGranted, "a pair is averaged in one step"),
        (TakesTheMean, "a pair is averaged in one step"),
        (ForgetsWhoWaits, "everybody comes to an end"),
        (AsksForEver, "everybody comes to an end: a run goes on for ever"),
    ),
)
def test_a_wrong_pair_is_caught(mutant, what):
    triangle = both_ways(((0, 1), (0, 2), (1, 2)))
    with pytest.raises(Violation, match=what):
        Parts(pairs(triangle, ((CALL,),) * 3, mutant)).explore()


class NoMass(push_sum.PushSumProtocol):
    """The model that there is at first is taken for w times it."""

    def begin(self):
        self.weight = self.initial


class KeepsAll(push_sum.PushSumProtocol):
    """A rank keeps what it sends."""

    def start(self):
        super().start()
        first, last = self.first_destination[self.phase : self.phase + 2]
        self.port.scale(1 + last - first)


class NewestFirst(neighbor_average.NeighborAverageProtocol):
    """A rank goes on once it has got any model."""

    def advance(self):
        for place, count in enumerate(self.messages):
            if self.calling and not count and sum(self.messages):
                source = self.awaited[place]
                kept = self.port.port.kept
                kept[source] = (kept[next(iter(kept))][-1],)
                self.messages[place] += 1
        super().advance()


class StaysAway(neighbor_average.NeighborAverageProtocol):
    """Who has been away is taken to be so for good."""

    def resume(self):
        self.paused = False
        self.advance()


class EndsAlone(parameter_server.ParameterServerProtocol):
    """Who is back from what all did together is in a round by itself."""

    def received(self, source, kind, number, weight):
        if kind == parameter_server.PUSH:
            self.away[source] = 0
        super().received(source, kind, number, weight)


class NoRoundFromHome(parameter_server.ParameterServerProtocol):
    """The server's own change ends no round."""

    def call(self):
        self.start()


class DropsLater(parameter_server.ParameterServerProtocol):
    """What is just too old is not dropped."""

    def absorb(self, source, number, speed):
        super().absorb(source, number + 1, speed)


class CountsWhatIsDropped(parameter_server.ParameterServerProtocol):
    """What is dropped makes other changes older."""

    def absorb(self, source, number, speed):
        before = self.dropped
        super().absorb(source, number, speed)
        self.version += self.dropped - before


class DropsUnanswered(parameter_server.ParameterServerProtocol):
    """Whose change is dropped gets no model."""

    def absorb(self, source, number, speed):
        self.answers = self.version - number < self.max_age or source == self.rank
        super().absorb(source, number, speed)

    def reply(self, rank):
        if self.answers:
            super().reply(rank)


class LooksAheadAtOnce(parameter_server.ParameterServerProtocol):
    """Momentum is applied with each change."""

    def absorb(self, source, number, speed):
        super().absorb(source, number, speed)
        if self.version % self.size:
            self.port.look_ahead(self.momentum)


class KeepsItsMomentum(parameter_server.ParameterServerProtocol):
    """Momentum goes on where all go on from a new model."""

    def restart(self, calls):
        mode, self.mode = self.mode, parameter_server.ASP
        super().restart(calls)
        self.mode = mode


class WaitsForAll(parameter_server.ParameterServerProtocol):
    """Who is away is waited for."""

    def is_out(self, i):
        return self.left[i] != 0


class LeavesAtOnce(neighbor_average.NeighborAverageProtocol):
    """Who leaves in a call does not wait for what it owes the others."""

    def owes(self):
        return False


def test_a_rank_that_leaves_too_early_is_caught():
    make, _ = neighbors(graphs.ring(3), 3, "global", protocol=LeavesAtOnce)
    with pytest.raises(Violation, match="everybody comes to an end"):
        Parts(world_of(make, ENDED_CALLS[0])).explore()


def run_seeds(world_of_seed):
    for seed in range(20):
        run_to_the_end(world_of_seed(), seed)


@pytest.mark.parametrize(
    "mutant, what",
    (
        (NoMass, "Σx stays"),
        (KeepsAll, "Σx stays"),
        (NewestFirst, "D-PSGD's recurrence"),
        (StaysAway, "everybody comes to an end"),
        (EndsAlone, "bsp is synchronous SGD"),
        (NoRoundFromHome, "everybody comes to an end"),
        (DropsLater, "what is too old is dropped"),
        (CountsWhatIsDropped, "what is too old is dropped"),
        (DropsUnanswered, "everybody comes to an end"),
        (LooksAheadAtOnce, "momentum is delayed"),
        (KeepsItsMomentum, "momentum is delayed"),
        (WaitsForAll, "everybody comes to an end"),
    ),
)
def test_a_wrong_variant_is_caught(mutant, what):
    size = 4
    if issubclass(mutant, push_sum.PushSumProtocol):
        weights = [1, 2, 3, 4]
        make, check = pushing(size, 2, weights=weights, protocol=mutant)[0], sums_stay(weights)
    elif issubclass(mutant, neighbor_average.NeighborAverageProtocol):
        make, matrix = neighbors(graphs.ring(size), size, protocol=mutant)
        far = distances(graphs.ring(size), size)
        check = follows(trajectory(matrix, 4), far, "neighbors")
    elif mutant in (DropsLater, CountsWhatIsDropped, DropsUnanswered):
        make, check = served("ringmaster", 0, 0, mutant, max_age=2), drops_by_age(2)
    elif mutant in (LooksAheadAtOnce, KeepsItsMomentum):
        make, check = served("async-local", 0, 0, mutant), follows_nesterov
    elif mutant is WaitsForAll:
        make, check = served("backup", 0, 1, mutant), None
    else:
        make, check = served("bsp", 0, 0, mutant), is_synchronous(synchronous(size, 0, 4))
    together = RESTART if mutant is KeepsItsMomentum else MEET
    programs = [(CALL, CALL, together, CALL, CALL, LEAVE)] * size
    with pytest.raises(AssertionError, match=what):
        run_seeds(lambda: world_of(make, programs, check))
