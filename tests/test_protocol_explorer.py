"""The wait-avoiding protocol keeps its invariants in every interleaving of small cases.

What is left out is shown to commute, and is compared with what is found when nothing is.
"""

from dataclasses import replace

import pytest
from protocol_explorer import (
    Explorer,
    NotCommuting,
    case,
    cases,
    explore_completely,
    explore_naively,
    is_supported,
    run_events,
)
from protocol_messages import Violation
from protocol_network import types_of
from protocol_scenarios import (
    AVERAGE,
    CALL,
    CLOSE,
    DELAYED,
    INTERRUPTED_CALL,
    JOIN,
    PUBLISH,
    SYNCHRONIZE,
    Load,
    Scenario,
)
from test_protocol_mutants import MUTANTS

# Ranks, group size, activators, versions before the synchronization: the numbers of states. Sets of
# activators that differ only in the ranks' numbers are explored once. What takes longer is left to
# `python -m tests.protocol_explorer`.

# With each rank as the laggard, so that nothing is taken on trust.
COMPLETELY = {
    (2, 2, (0,), 3): (50, 60),
    (3, 2, (0,), 3): (439, 118, 244),
    (3, 2, (1,), 3): (360, 733, 213),
    (3, 2, (2,), 3): (225, 662, 657),
    (3, 3, (0,), 3): (476, 114, 160),
    (3, 3, (1,), 3): (173, 408, 114),
    (3, 3, (2,), 3): (102, 160, 408),
    (4, 2, (0,), 3): (278, 252, 528, 522),
    (4, 4, (0,), 3): (271, 288, 329, 348),
    (2, 2, (0, 1), 3): (1384,),
    (3, 2, (0, 1), 1): (1546, 2262, 1887),
    (3, 2, (0, 2), 1): (1760, 1005, 1242),
    (3, 2, (1, 2), 1): (937, 1337, 1748),
    (3, 3, (0, 1), 1): (1357, 1771, 932),
    (3, 3, (0, 2), 1): (1754, 932, 1252),
    (3, 3, (1, 2), 1): (826, 1297, 1771),
    (4, 2, (0, 1), 1): (941, 1737),
    (4, 2, (0, 2), 1): (2758, 2282),
    (4, 2, (0, 3), 1): (2886, 3168),
    (4, 4, (0, 1), 1): (1031, 874),
    (4, 4, (0, 2), 1): (2760, 2479),
    (4, 4, (0, 3), 1): (2978, 3188),
    (3, 2, (0, 1, 2), 1): (8958, 8949, 8900),
    (3, 3, (0, 1, 2), 1): (9157, 9265, 8831),
}

# Without a laggard.
LONGER = {
    (3, 2, (0, 1), 3): 2352,
    (3, 2, (0, 2), 3): 1761,
    (3, 2, (1, 2), 3): 1650,
    (3, 3, (0, 1), 3): 1525,
    (3, 3, (0, 2), 3): 1449,
    (3, 3, (1, 2), 3): 1525,
    (4, 2, (0, 1), 3): 646,
    (4, 2, (0, 2), 3): 2888,
    (4, 2, (0, 3), 3): 3053,
    (4, 4, (0, 1), 3): 634,
    (4, 4, (0, 2), 3): 2335,
    (4, 4, (0, 3), 3): 2883,
    (3, 3, (0, 1, 2), 2): 6961,
    (4, 2, (0, 1, 2), 1): 3869,
    (4, 4, (0, 1, 2), 1): 3884,
    (4, 2, (0, 1, 2, 3), 1): 6774,
    (4, 4, (0, 1, 2, 3), 1): 7420,
}


def large(arguments, states):
    """Return a case, left to `make test-extra` or `pytest -m long` where it takes long."""
    marks = [pytest.mark.extra] * (sum(states) > 5000) + [pytest.mark.long] * (sum(states) > 20_000)
    return pytest.param(arguments, states, marks=marks)


@pytest.mark.parametrize(
    "arguments, states", [large(*item) for item in COMPLETELY.items()], ids=str
)
def test_versions_and_a_synchronization_keep_every_invariant(arguments, states):
    explored = explore_completely(case(*arguments))
    assert tuple(len(explorer.seen) for explorer in explored) == states


@pytest.mark.extra
@pytest.mark.parametrize("arguments, states", LONGER.items(), ids=str)
def test_more_versions_and_a_synchronization_keep_every_invariant(arguments, states):
    assert len(explored(case(*arguments), symmetric=True).seen) == states


def test_every_set_of_activators_is_explored():
    assert {arguments[:3] for arguments in (*COMPLETELY, *LONGER)} == set(cases())


EVERY_INTERLEAVING = {
    "two ranks call": Scenario(2, 2, 9, ((CALL, CALL, CALL, CLOSE),) * 2),
    "their activations are delayed": Scenario(2, 2, 9, ((CALL, CALL, CLOSE),) * 2, sends=DELAYED),
    "they synchronize": Scenario(2, 2, 2, ((CALL, CALL, CALL, CLOSE),) * 2),
    "their groups have one member": Scenario(2, 1, 2, ((CALL, CALL, CALL, CLOSE),) * 2),
    "they average between calls": Scenario(2, 2, 9, ((CALL, AVERAGE, CALL, CLOSE),) * 2),
    "they publish between calls": Scenario(2, 2, 9, ((CALL, PUBLISH, CALL, CLOSE),) * 2),
    "one closes earlier": Scenario(2, 2, 3, ((CALL, CALL, CALL, CLOSE), (CALL, CLOSE))),
    "one does not synchronize": Scenario(
        2, 2, 9, ((CALL, SYNCHRONIZE, CALL, CLOSE), (CALL, CALL, CLOSE))
    ),
    "one is interrupted": Scenario(2, 2, 9, ((INTERRUPTED_CALL, CALL, CLOSE), (CALL, CALL, CLOSE))),
    "nobody is passive": Scenario(2, 2, 2, ((CALL, CALL, CALL, CLOSE),) * 2, passive=False),
    "nobody is passive, one closes earlier": Scenario(
        2, 2, 9, ((CALL, CALL, CLOSE), (CLOSE,)), passive=False
    ),
    "nobody is passive, one averages": Scenario(
        2, 2, 9, ((CALL, CALL, CLOSE), (AVERAGE, CLOSE)), passive=False
    ),
    "nobody is passive, one is interrupted": Scenario(
        2, 2, 9, ((INTERRUPTED_CALL, CALL, CLOSE), (CALL, CALL, CLOSE)), passive=False
    ),
    "two of three ranks call": Scenario(3, 2, 9, ((CALL, CLOSE), (CALL, CLOSE), (CLOSE,))),
    "one joins earlier, and they go on": Scenario(
        2, 2, 9, ((CALL, CALL, JOIN, CALL, CLOSE), (CALL, JOIN, CALL, CLOSE))
    ),
    "one joins earlier, the other synchronizes": Scenario(
        2, 2, 3, ((CALL, CALL, CALL, CALL, JOIN, CLOSE), (CALL, JOIN, CLOSE))
    ),
    "one joins earlier, the other averages": Scenario(
        2, 2, 9, ((CALL, CALL, AVERAGE, CALL, JOIN, CALL, CLOSE), (JOIN, CALL, CLOSE))
    ),
    "one joins earlier, the other averages and closes": Scenario(
        2, 2, 9, ((CALL, CALL, AVERAGE, CALL, CLOSE), (CALL, JOIN, CLOSE))
    ),
    "one joins later than the other synchronizes": Scenario(
        2, 2, 9, ((CALL, SYNCHRONIZE, CALL, CLOSE), (CALL, CALL, JOIN, CLOSE))
    ),
    "one joins, the other loads": Scenario(2, 2, 9, ((CALL, Load(0), CLOSE), (CALL, JOIN, CLOSE))),
    "one joins after an interrupted call": Scenario(
        2, 2, 9, ((INTERRUPTED_CALL, JOIN, CALL, CLOSE), (JOIN, CALL, CLOSE))
    ),
    "nobody is passive, one joins earlier": Scenario(
        2, 2, 3, ((CALL, CALL, JOIN, CALL, CALL, CLOSE), (JOIN, CALL, CALL, CLOSE)), passive=False
    ),
    "their groups have one member, one joins earlier": Scenario(
        2, 1, 3, ((CALL, CALL, CALL, CALL, JOIN, CALL, CLOSE), (CALL, JOIN, CALL, CLOSE))
    ),
    "one of three ranks calls, all join": Scenario(
        3, 2, 9, ((CALL, JOIN, CLOSE), (JOIN, CLOSE), (JOIN, CLOSE))
    ),
    "they load and go back": Scenario(2, 2, 2, ((CALL, CALL, Load(0), CALL, CLOSE),) * 2),
    "they load and go forward": Scenario(2, 2, 3, ((CALL, Load(5), CALL, CALL, CLOSE),) * 2),
    "both fail": Scenario(2, 2, 9, ((CALL, CLOSE), (CLOSE,)), failing=frozenset({0, 1})),
    "one fails, and they heed it": Scenario(
        2, 2, 2, ((CALL, CALL, CLOSE), (CALL, JOIN, CLOSE)), failing=frozenset({0}), heeds=True
    ),
    "one of three ranks fails": Scenario(3, 1, 9, ((CLOSE,),) * 3, failing=frozenset({0})),
}

ALL_STATES = {
    "two ranks call": 2515,
    "their activations are delayed": 1700,
    "they synchronize": 881,
    "their groups have one member": 94,
    "they average between calls": 881,
    "they publish between calls": 1329,
    "one closes earlier": 389,
    "one does not synchronize": 389,
    "one is interrupted": 1635,
    "nobody is passive": 441,
    "nobody is passive, one closes earlier": 53,
    "nobody is passive, one averages": 63,
    "nobody is passive, one is interrupted": 749,
    "two of three ranks call": 4126,
    "one joins earlier, and they go on": 787,
    "one joins earlier, the other synchronizes": 547,
    "one joins earlier, the other averages": 313,
    "one joins earlier, the other averages and closes": 528,
    "one joins later than the other synchronizes": 413,
    "one joins, the other loads": 235,
    "one joins after an interrupted call": 506,
    "nobody is passive, one joins earlier": 202,
    "their groups have one member, one joins earlier": 137,
    "one of three ranks calls, all join": 977,
    "they load and go back": 1053,
    "they load and go forward": 1025,
    "both fail": 727,
    "one fails, and they heed it": 1495,
    "one of three ranks fails": 1661,
}
LOOKED_UP = {
    name: scenario for name, scenario in EVERY_INTERLEAVING.items() if is_supported(scenario)
}
NAIVELY = sorted({*EVERY_INTERLEAVING} - {*LOOKED_UP})
COMPARED = [name for name in LOOKED_UP if ALL_STATES[name] < 600]


def explored(scenario, **options):
    explorer = Explorer(scenario, **options)
    assert explorer.explore()
    return explorer


@pytest.mark.parametrize("name", LOOKED_UP)
def test_every_interleaving_keeps_every_invariant(name):
    """Nothing is left out, and what would be commutes."""
    assert len(explored(LOOKED_UP[name], reduced=False).seen) == ALL_STATES[name]


@pytest.mark.extra
@pytest.mark.parametrize("name", NAIVELY)
def test_every_interleaving_of_loads_and_failures_keeps_every_invariant(name):
    states, _ = explore_naively(EVERY_INTERLEAVING[name])
    assert len(states) == ALL_STATES[name]


# Each version is started by the rank that is drawn for it, unless a rank is in an operation

DRAWN = [
    "two ranks call",
    "their activations are delayed",
    "they synchronize",
    "they average between calls",
    "one closes earlier",
    "one does not synchronize",
    "one is interrupted",
    "one joins earlier, the other averages and closes",
    "one joins after an interrupted call",
]
DRAWN_OF_MORE = {
    "one of three ranks calls, all join": Scenario(
        3, 3, 9, ((CALL, JOIN, CLOSE), (JOIN, CLOSE), (JOIN, CLOSE))
    ),
    "three ranks synchronize": Scenario(3, 3, 3, ((CALL, CALL, CALL, CLOSE),) * 3),
    "one of two ranks is interrupted, the other closes": Scenario(
        2, 2, 9, ((INTERRUPTED_CALL, CALL, CLOSE), (CLOSE,))
    ),
    "one of four ranks calls": case(4, 4, (0,), 1),
}


@pytest.mark.parametrize("seed", (1, 2))
@pytest.mark.parametrize("name", DRAWN)
def test_every_interleaving_of_drawn_starts_keeps_every_invariant(name, seed):
    """With the seeds, either of the two ranks is drawn for the first version, and the second."""
    explored(replace(LOOKED_UP[name], seed=seed), reduced=False)


@pytest.mark.parametrize("name", DRAWN_OF_MORE)
def test_drawn_starts_of_more_ranks_keep_every_invariant(name):
    explore_completely(replace(DRAWN_OF_MORE[name], seed=1))


# What is left out


@pytest.mark.extra
@pytest.mark.parametrize("name", COMPARED)
def test_steps_that_are_looked_up_lead_where_those_that_are_made_do(name):
    states, ends = explore_naively(LOOKED_UP[name])
    whole, reduced = explored(LOOKED_UP[name], reduced=False), explored(LOOKED_UP[name])
    assert {whole.world_state(state) for state in whole.seen} == states
    for explorer in whole, reduced:
        assert {explorer.world_state(state) for state in explorer.ends} == ends
    assert len(reduced.seen) < len(states) / 3


SMALL = ((2, 2, (0, 1), 3), (3, 2, (0,), 3), (3, 3, (0, 1), 1), (4, 2, (0,), 2), (4, 4, (0,), 1))


@pytest.mark.extra
@pytest.mark.parametrize("arguments", SMALL, ids=str)
def test_nothing_is_missed_where_each_rank_lags_in_turn(arguments):
    scenario = case(*arguments)
    whole, lagging = explored(scenario, reduced=False), explore_completely(scenario)
    assert len(whole.seen) > 3 * max(len(explorer.seen) for explorer in lagging)
    ends = {whole.world_state(state) for state in whole.ends}
    for explorer in lagging:
        assert {explorer.world_state(state) for state in explorer.ends} == ends
    assert whole.apart == max(explorer.apart for explorer in lagging)
    assert whole.waiting == max(explorer.waiting for explorer in lagging)


SYMMETRIC = ((2, 2, (0, 1), 3), (4, 2, (0, 3), 2), (4, 4, (0, 1, 2, 3), 0))


@pytest.mark.extra
@pytest.mark.parametrize("arguments", SYMMETRIC, ids=str)
def test_of_states_that_differ_in_the_ranks_numbers_one_is_explored(arguments):
    scenario = case(*arguments)
    explorer = Explorer(scenario, symmetric=True)
    explorer.explore()
    other = Explorer(scenario, symmetric=True)
    shifts, other.shifts = other.shifts, ()
    other.explore()
    everything, other.shifts, other.seen = other.seen, shifts, set()
    other.explore()
    assert other.seen == {other.key(state) for state in everything}
    assert len(explorer.seen) == len(other.seen) < len(everything)


# Wrong variants

CAUGHT_IN = {
    "TimelyUntilExecuted": "two ranks call",
    "NoGate": "they synchronize",
    "BlockingSynchronization": "one of three ranks calls, all join",
    "LeavesWithoutFin": "one closes earlier",
    "LateWithoutWaiting": "they synchronize",
    "PublishesWhileRunning": "they publish between calls",
    "GroupMembersServeOnlyWhenClosing": "nobody is passive, one averages",
    "InterruptedMemberServesNobody": "nobody is passive, one is interrupted",
    "Impatient": "one is interrupted",
    "MovesWithoutDraining": "one of three ranks calls, all join",
    "SkipsWhatIsOutstanding": "one of three ranks calls, all join",
    "FinishesAtItsOwnVersion": "one joins earlier, and they go on",
    "JoinsOneOperation": "one joins earlier, the other averages",
    "JoinedServesNobody": "one joins earlier, and they go on",
    "OvertakenByWhoHasJoined": "one joins later than the other synchronizes",
    "TrainsAfterJoining": "one joins earlier, and they go on",
}
VARIANTS = {mutant.variant.__name__: mutant.variant for mutant in MUTANTS}


@pytest.mark.parametrize("variant, name", CAUGHT_IN.items(), ids=CAUGHT_IN)
def test_a_wrong_variant_is_caught_and_the_events_show_it(variant, name):
    scenario, types = LOOKED_UP[name], types_of(VARIANTS[variant])
    with pytest.raises(Violation):
        explored(scenario, reduced=False, **types)
    with pytest.raises(Violation) as caught:
        explore_completely(scenario, **types)
    assert str(caught.value.events) in str(caught.value)
    run_events(scenario, caught.value.events[:-1], **types)
    with pytest.raises(Violation):
        run_events(scenario, caught.value.events, **types)


def test_a_variant_of_which_more_was_left_out_than_commutes_is_told():
    """What it does not forward breaks no invariant here, but depends on the order."""
    with pytest.raises(NotCommuting):
        explore_completely(
            LOOKED_UP["two of three ranks call"], protocol_type=VARIANTS["ForwardsOnlyTheFirst"]
        )
