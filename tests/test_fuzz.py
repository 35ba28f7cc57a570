"""Random scenarios of the collectives; `python -m tests.fuzz` plays more of them."""

import re

import numpy as np
import pytest
from fuzz import formed, queues
from fuzz.interrupts import Interrupted
from fuzz.kinds import KINDS, play_kind
from fuzz.scenario import Failed, Options
from fuzz.vectors import GUARD
from together import as_list

from collectives import (
    GroupAllreduce,
    PairwiseAverage,
    PartialAllreduce,
    PushSum,
    QueuedNeighborAverage,
    settings,
)

# Scenarios draw their transports.
pytestmark = [pytest.mark.mpi, pytest.mark.transports()]

# Of each kind some that differ much.
SEEDS = {
    "groups": (2, 4, 8, 12, 13, 16, 18),
    "own-pace": (1, 2, 3, 4, 5, 7),
    "peers": (1, 2, 3, 4, 7, 9),
    "triggered": (1, 2, 3),
    "interrupts": (2, 3, 4, 7, 8),
    "formed": (1, 2, 3, 4),
    "queues": (1, 2, 3, 5),
    "counts": (1, 2, 3, 4, 5, 9),
    "constructions": (1,),
    "allocations": (1, 2, 3),
}
MOST_SEEDS = 100  # in one of which a mistake is found


@pytest.mark.ranks(1, 3, 4, 8)
@pytest.mark.parametrize(
    ("kind", "seed"), [(kind, seed) for kind, seeds in SEEDS.items() for seed in seeds]
)
def test_everything_holds_in_a_random_scenario(comm, kind, seed):
    play_kind(kind, comm, seed)


# Whether a mistake would be found


def one_element_is_wrong(monkeypatch):
    def synchronize(self, vector):
        original(self, vector)
        if self.rank == self.size - 1:
            array = as_list(vector)[-1]
            array.view(np.uint8)[-array.itemsize] ^= 1

    original = GroupAllreduce.synchronize
    monkeypatch.setattr(GroupAllreduce, "synchronize", synchronize)


def the_byte_after_an_array_changes(monkeypatch):
    def synchronize(self, vector):
        original(self, vector)
        as_list(vector)[0].base.view(np.uint8)[-GUARD] ^= 1

    original = GroupAllreduce.synchronize
    monkeypatch.setattr(GroupAllreduce, "synchronize", synchronize)


def join_loses_the_last_change(monkeypatch):
    def call(self, vector, **weight):
        result = original_call(self, vector, **weight)
        self.returned = [array.copy() for array in as_list(vector)]
        return result

    def join(self, vector):
        for array, returned in zip(as_list(vector), getattr(self, "returned", ())):
            array[:] = returned
        original_join(self, vector)

    original_call, original_join = GroupAllreduce.__call__, GroupAllreduce.join
    monkeypatch.setattr(GroupAllreduce, "__call__", call)
    monkeypatch.setattr(GroupAllreduce, "join", join)


def weights_are_ignored(monkeypatch):
    def call(self, vector, weight=1.0):
        return original(self, vector)

    original = GroupAllreduce.__call__
    monkeypatch.setattr(GroupAllreduce, "__call__", call)


def an_interrupted_call_gives_the_vector_back(monkeypatch):
    def call(self, vector, **weight):
        given = [array.copy() for array in as_list(vector)]
        try:
            return original(self, vector, **weight)
        except Interrupted:
            for array, before in zip(as_list(vector), given):
                array[:] = before - 1
            raise

    original = GroupAllreduce.__call__
    monkeypatch.setattr(GroupAllreduce, "__call__", call)


def a_period_keeps_what_was_put_in(monkeypatch):
    monkeypatch.setattr(PartialAllreduce, "_begin_period", lambda self: None)


def pushed_weights_do_not_count(monkeypatch):
    monkeypatch.setattr(PushSum, "_weight", lambda self: 1.0)


def pairs_leave_out_the_last_change(monkeypatch):
    def prepare(self, vector):
        self._read_model(vector)
        return original(self, vector)

    original = PairwiseAverage._prepare
    monkeypatch.setattr(PairwiseAverage, "_prepare", prepare)


def the_newest_model_weighs_as_much_as_the_others(monkeypatch):
    def equal(iterations, *_, **__):
        return np.full(len(iterations), 1 / len(iterations)), 0

    monkeypatch.setattr(formed, "dynamic_weights", equal)


def a_late_contribution_is_lost(monkeypatch):
    def call(self, vector):
        late = self.version % 3 == self.rank % 3
        if late:
            vector[:] = 0
        return original(self, vector)

    original = PartialAllreduce.__call__
    monkeypatch.setattr(PartialAllreduce, "__call__", call)


def tokens_are_not_waited_for(monkeypatch):
    def make(*arguments, **settings):
        if settings.get("max_gap"):
            settings["max_gap"] = 20
        return original(*arguments, **settings)

    original = QueuedNeighborAverage
    monkeypatch.setattr(queues, "QueuedNeighborAverage", make)


def versions_leave_nothing_out(monkeypatch):
    monkeypatch.setattr(settings, "periods_of", lambda given: (1,) * settings.array_count(given))


def parts_count_twice(monkeypatch):
    def lease(self, vector):
        return original(self, [2 * array for array in vector])

    original = GroupAllreduce.lease
    monkeypatch.setattr(GroupAllreduce, "lease", lease)


UNEQUAL = "'wait': 'group'.*'weights': 'random 1', 'poison': 0, 'end': 'together'"
OWN_EXACT = "OwnPace .*'wire_dtype': None.* float64, poison"
MISTAKES = [
    (one_element_is_wrong, "groups", "'synchronize'", "vectors differ"),
    (the_byte_after_an_array_changes, "own-pace", "'synchronize'", "changed alike differ"),
    (
        join_loses_the_last_change,
        "groups",
        "'join', .*'conserves': True",
        "instead of|does not repeat",
    ),
    (weights_are_ignored, "groups", UNEQUAL, "the weights' sum is"),
    (an_interrupted_call_gives_the_vector_back, "interrupts", "'conserving'", "instead of"),
    (join_loses_the_last_change, "own-pace", f"{OWN_EXACT}.*'join'", "instead of"),
    (
        an_interrupted_call_gives_the_vector_back,
        "own-pace",
        f"^Interrupted{OWN_EXACT}.*('sync|'join)",
        "instead of",
    ),
    (a_period_keeps_what_was_put_in, "peers", "^sums .*'synchronize'", "instead of"),
    (pushed_weights_do_not_count, "peers", "^push-sum .*'graph'", "instead of"),
    (pairs_leave_out_the_last_change, "peers", "^pairs ", "instead of"),
    (the_newest_model_weighs_as_much_as_the_others, "formed", "'dynamic'", "instead of"),
    (a_late_contribution_is_lost, "counts", "^CountedPartial", "lost|lacks|not all|late"),
    (
        versions_leave_nothing_out,
        "groups",
        r"'group_size': [23].*'late': 'conserving'.*'only_all_ranks': \[\d",
        "left out",
    ),
    (parts_count_twice, "counts", "^CountedLeases .*'engine': 'adaptive'", "of .* instead of"),
    (tokens_are_not_waited_for, "queues", "'max_gap': [12], 'backup': [12[]", "ranks .* are at"),
]


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("mistake", "kind", "planned", "said"), MISTAKES)
def test_a_mistake_is_found(comm, monkeypatch, mistake, kind, planned, said):
    """In the first few scenarios whose plans have what it is a mistake in."""
    mistake(monkeypatch)
    plans = ((seed, str(KINDS[kind](comm, seed, Options()))) for seed in range(MOST_SEEDS))
    with pytest.raises(Failed, match=said if comm.rank == 0 else "^failed"):
        for seed, plan in plans:
            if re.search(planned, plan):
                play_kind(kind, comm, seed)
