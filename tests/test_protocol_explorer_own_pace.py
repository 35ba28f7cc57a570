"""Ranks at their own pace keep the protocol's invariants in every interleaving of small cases.

See `test_protocol_explorer` for what is left out, and why that misses nothing.
"""

import pytest
from protocol_explorer import (
    Explorer,
    explore_completely,
    explore_naively,
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
    NONFINITE_CALL,
    PUBLISH,
    SYNCHRONIZE,
    Load,
    Scenario,
)
from test_protocol_mutants import MUTANTS


def own_pace(group_size, sync_period, *programs, **others):
    """Return a scenario of ranks that make any numbers of calls, and close."""
    return Scenario(
        len(programs),
        group_size,
        sync_period,
        tuple((*program, CLOSE) for program in programs),
        conserving=True,
        own_pace=True,
        **others,
    )


def calls(group_size, sync_period, *counts, **others):
    """Return one in which ranks only make so many calls."""
    return own_pace(group_size, sync_period, *((CALL,) * count for count in counts), **others)


# The numbers of states in every interleaving, and with each rank as the laggard, but for those that
# differ only in the ranks' numbers.
TWO_RANKS = {
    "three calls each": (calls(2, 9, 3, 3), 2991, (872,)),
    "groups of one, every second version of all": (calls(1, 2, 3, 3), 2859, (801,)),
    "groups of one, every third version of all": (calls(1, 3, 3, 3), 2874, (791,)),
    "more calls": (calls(1, 2, 3, 1), 487, (152, 151)),
    "calls of one": (calls(1, 3, 3, 0), 85, (28, 33)),
    "delayed activations": (calls(1, 2, 3, 2, sends=DELAYED), 3366, (940, 974)),
    "an average": (
        own_pace(1, 2, (CALL, CALL, AVERAGE, CALL), (CALL, AVERAGE, CALL)),
        744,
        (254, 208),
    ),
    "a synchronization": (
        own_pace(1, 3, (CALL, CALL, SYNCHRONIZE, CALL), (SYNCHRONIZE, CALL)),
        478,
        (88, 166),
    ),
    "a publication": (own_pace(1, 2, (CALL, PUBLISH, CALL), (CALL, CALL)), 1045, (316, 356)),
    "joining": (own_pace(1, 2, (CALL, CALL, JOIN, CALL), (CALL, JOIN, CALL)), 719, (241, 196)),
    "joining before an average": (
        own_pace(1, 2, (CALL, CALL, AVERAGE, CALL, JOIN, CALL), (JOIN, CALL)),
        414,
        (98, 145),
    ),
    "joining before a synchronization": (
        own_pace(2, 3, (CALL, SYNCHRONIZE, CALL, CALL, JOIN), (CALL, JOIN)),
        472,
        (133, 135),
    ),
    "joining where the other closes": (
        own_pace(1, 2, (CALL, CALL, AVERAGE, CALL), (CALL, JOIN)),
        511,
        (146, 153),
    ),
    "an interrupted call": (
        own_pace(2, 9, (INTERRUPTED_CALL, CALL), (CALL,) * 2),
        2071,
        (627, 767),
    ),
    "one before a version of all": (
        own_pace(1, 2, (INTERRUPTED_CALL, CALL, CALL), (CALL, CALL)),
        3174,
        (940, 990),
    ),
    "one on each rank": (own_pace(1, 3, *[(INTERRUPTED_CALL, CALL)] * 2), 3122, (1143,)),
    "a call that is not finite": (
        own_pace(1, 2, (NONFINITE_CALL, CALL, CALL), (CALL, CALL)),
        1477,
        (438, 419),
    ),
    "one before each joins": (
        own_pace(1, 2, (CALL, NONFINITE_CALL, JOIN, CALL), (NONFINITE_CALL, JOIN, CALL)),
        719,
        (241, 196),
    ),
    "an interrupted call before joining": (
        own_pace(1, 2, (INTERRUPTED_CALL, JOIN, CALL), (CALL, JOIN, CALL)),
        1750,
        (472, 528),
    ),
}

# Each rank as the laggard.
THREE_RANKS = {
    "3, 0, 0 calls": (calls(2, 2, 3, 0, 0), (283, 99, 153)),
    "3, 1, 0 calls": (calls(2, 3, 3, 1, 0), (1717, 764, 763)),
    "3, 1, 0 calls, groups of one": (calls(1, 2, 3, 1, 0), (1601, 805, 1087)),
    "1, 1, 1 calls, groups of one": (calls(1, 2, 1, 1, 1), (877, 877, 877)),
    "2, 2, 0 calls": (calls(2, 2, 2, 2, 0), (1822, 2177, 1169)),
    "2, 1, 1 calls, groups of one": (calls(1, 2, 2, 1, 1), (3128, 1564, 1549)),
    "2, 1, 1 calls": (calls(2, 2, 2, 1, 1), (3442, 1952, 1713)),
    "3, 1, 1 calls": (calls(2, 3, 3, 1, 1), (8814, 3436, 3337)),
    "2, 2, 1 calls": (calls(2, 2, 2, 2, 1), (7512, 8319, 4510)),
    "2, 2, 2 calls": (calls(2, 2, 2, 2, 2), (20460, 20740, 19245)),
    "3, 2, 1 calls": (calls(2, 3, 3, 2, 1), (23088, 14947, 10461)),
    "a call that is not finite": (
        own_pace(2, 2, (NONFINITE_CALL, CALL), (CALL,), ()),
        (844, 588, 402),
    ),
    "an interrupted call": (
        own_pace(2, 2, (INTERRUPTED_CALL, CALL), (CALL,), ()),
        (2058, 1818, 1219),
    ),
    "joining": (own_pace(2, 2, (CALL, CALL, JOIN), (CALL, JOIN), (JOIN,)), (1036, 573, 403)),
    "joining before an average": (
        own_pace(1, 2, (CALL, CALL, AVERAGE, CALL, JOIN), (CALL, JOIN), (JOIN,)),
        (1396, 691, 744),
    ),
    "a synchronization": (
        own_pace(2, 3, (CALL, CALL, SYNCHRONIZE, CALL), (CALL, SYNCHRONIZE), (SYNCHRONIZE,)),
        (1597, 888, 715),
    ),
}


def marks_of(states):
    """Return the marks of a case that takes long, by its numbers of states."""
    large = states > 1000 if isinstance(states, int) else sum(states) > 8000
    huge = not isinstance(states, int) and sum(states) > 15000
    return [pytest.mark.extra] * large + [pytest.mark.long, pytest.mark.timeout(1200)] * huge


def parameters(cases):
    """Return named cases; `make test-extra` explores large ones, and `pytest -m long` huge ones."""
    return [pytest.param(*case, id=name, marks=marks_of(case[-1])) for name, case in cases.items()]


@pytest.mark.parametrize("scenario, states, lagging", parameters(TWO_RANKS))
def test_every_interleaving_of_two_ranks_keeps_every_invariant(scenario, states, lagging):
    """Nothing is left out, and what would be commutes."""
    explorer = Explorer(scenario, reduced=False)
    explorer.explore()
    assert len(explorer.seen) == states
    assert tuple(len(explorer.seen) for explorer in explore_completely(scenario)) == lagging


@pytest.mark.parametrize("scenario, lagging", parameters(THREE_RANKS))
def test_three_ranks_with_each_as_the_laggard_keep_every_invariant(scenario, lagging):
    assert tuple(len(explorer.seen) for explorer in explore_completely(scenario)) == lagging


# Without a laggard.
THREE_CALLS_EACH = {(2, 2): 39833, (2, 3): 41738, (1, 2): 38182}


@pytest.mark.extra
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("settings, states", THREE_CALLS_EACH.items(), ids=str)
def test_three_calls_of_each_of_three_ranks_keep_every_invariant(settings, states):
    explorer = Explorer(calls(*settings, 3, 3, 3))
    explorer.explore()
    assert len(explorer.seen) == states


# What only whole worlds do, in which the vectors' values are checked, too.
NAIVELY = {
    "one fails": (own_pace(1, 2, (CALL, CALL), (CALL,), failing=frozenset({0})), 1075),
    "one fails, and they heed it": (
        own_pace(1, 2, (CALL, CALL), (CALL, JOIN), failing=frozenset({0}), heeds=True),
        1543,
    ),
    "one of three fails": (own_pace(1, 2, (CALL,), (), (), failing=frozenset({0})), 8144),
    "they load after different numbers of calls": (
        own_pace(1, 2, (CALL, CALL, Load(0), CALL), (Load(0), CALL)),
        284,
    ),
    "they load and go forward": (own_pace(2, 3, (CALL, Load(5), CALL), (Load(5), CALL)), 264),
}


@pytest.mark.parametrize("scenario, states", parameters(NAIVELY))
def test_every_interleaving_of_loads_and_failures_keeps_every_invariant(scenario, states):
    assert len(explore_naively(scenario)[0]) == states


LOOKED_UP = (
    "more calls",
    "an average",
    "a synchronization",
    "joining",
    "joining before an average",
)


@pytest.mark.extra
@pytest.mark.parametrize("name", LOOKED_UP)
def test_steps_that_are_looked_up_lead_where_those_that_are_made_do(name):
    scenario, *_ = TWO_RANKS[name]
    states, ends = explore_naively(scenario)
    for reduced in (False, True):
        explorer = Explorer(scenario, reduced=reduced)
        explorer.explore()
        assert {explorer.world_state(state) for state in explorer.ends} == ends
        assert reduced or {explorer.world_state(state) for state in explorer.seen} == states


CAUGHT_IN = {
    "StartsWhereLate": "more calls",
    "ReturnsWhileAnExchangeRuns": "more calls",
    "WaitsForApplications": "calls of one",
    "AgreesOnItsOwnVersion": "an average",
    "ForgetsWhatWasAbandoned": "an interrupted call",
    "TellsNobody": "calls of one",
}
VARIANTS = {mutant.variant.__name__: mutant.variant for mutant in MUTANTS}


@pytest.mark.parametrize("variant, name", CAUGHT_IN.items(), ids=CAUGHT_IN)
def test_a_wrong_variant_is_caught_and_the_events_show_it(variant, name):
    scenario, types = TWO_RANKS[name][0], types_of(VARIANTS[variant])
    with pytest.raises(Violation) as caught:
        explore_completely(scenario, **types)
    run_events(scenario, caught.value.events[:-1], **types)
    with pytest.raises(Violation):
        run_events(scenario, caught.value.events, **types)
