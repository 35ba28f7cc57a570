"""Positions in training data: saved, gone to without loading, and dealt to other ranks."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from wagma import data, generators
from wagma.tasks import contract
from wagma.tasks.endless import Endless


class Numbers(Dataset):
    """The numbers to 20, with noise that is drawn when one is loaded; counts those."""

    loaded = 0

    def __len__(self):
        return 20

    def __getitem__(self, index):
        Numbers.loaded += 1
        return torch.tensor([float(index), torch.rand(()).item()])


def shuffled():
    return DataLoader(Numbers(), 3, shuffle=True)


def with_generator():
    return DataLoader(Numbers(), 3, shuffle=True, generator=torch.Generator().manual_seed(5))


def sampled():
    generator = torch.Generator().manual_seed(5)
    return DataLoader(Numbers(), 3, sampler=RandomSampler(Numbers(), generator=generator))


def batch_sampled():
    first, second = (torch.Generator().manual_seed(seed) for seed in (5, 6))
    sampler = WeightedRandomSampler([0.5] * 20, 20, generator=first)
    return DataLoader(Numbers(), batch_sampler=BatchSampler(sampler, 3, False), generator=second)


def distributed():
    return DataLoader(Numbers(), 3, sampler=DistributedSampler(Numbers(), 2, 1))


def listed():
    return [torch.tensor([[float(each)]]) for each in range(5)]


def stream():
    return (torch.rand(2, 1) for _ in itertools.count())


def numbers():
    return iter(torch.arange(400.0).view(-1, 2))


def indices():
    return data.Batches(np.arange(11), 4, 0, 3, torch.from_numpy)


KINDS = (
    shuffled,
    with_generator,
    sampled,
    batch_sampled,
    distributed,
    listed,
    stream,
    numbers,
    indices,
)


def bits(batches):
    return [batch.numpy().tobytes() for batch in batches]


class Permuted:
    """Batches of the numbers to 20, in passes, that know their position."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)
        self.left = None

    def __iter__(self):
        if self.left is None:
            self.left = torch.randperm(20, generator=self.generator).tolist()
        while self.left:
            batch, self.left = self.left[:3], self.left[3:]
            yield batch
        self.left = None

    def state_dict(self):
        return {"left": self.left, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.left = state["left"]
        self.generator.set_state(state["generator"])


def indexed():
    """As the images are loaded that are changed at random."""
    return DataLoader(Numbers(), batch_sampler=data.Batches(np.arange(20), 3, 0, 3, list))


def in_passes():
    return DataLoader(Numbers(), batch_sampler=Permuted())


KINDS += (indexed, in_passes)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("drawn", [0, 1, 6, 7, 16])
def test_batches_go_on_at_a_position_as_if_nothing_had_been(make, drawn):
    """In the middle of a pass and at its end; with what is drawn at random while loading."""
    torch.manual_seed(1)
    endless = Endless(make(), "task")
    endless.peek()
    list(itertools.islice(endless, drawn))
    position, states = endless.state_dict(), generators.states()
    expected = bits(itertools.islice(endless, 20))
    torch.manual_seed(1)  # as a job does that begins again
    again = Endless(make(), "task")
    again.peek()
    torch.rand(3)
    again.load_state_dict(position)
    generators.restore(states)
    assert bits(itertools.islice(again, 20)) == expected


@pytest.mark.parametrize("sampler", [lambda: data.Batches(np.arange(20), 3, 0, 3, list), Permuted])
@pytest.mark.parametrize(("drawn", "persistent"), [(0, False), (6, False), (8, True)])
def test_what_workers_have_been_sent_ahead_is_not_lost(sampler, drawn, persistent):
    def begun():
        loader = DataLoader(
            torch.arange(20),
            batch_sampler=sampler(),
            num_workers=1,
            persistent_workers=persistent,
        )
        endless = Endless(loader, "task")
        endless.peek()
        return endless

    endless, again = begun(), begun()
    list(itertools.islice(endless, drawn))
    next(again)
    again.load_state_dict(endless.state_dict())
    assert bits(itertools.islice(again, 9)) == bits(itertools.islice(endless, 9))


def test_a_position_in_an_older_checkpoint_has_the_loader_s_generator_alone():
    endless = Endless(with_generator(), "task")
    list(itertools.islice(endless, 9))  # in the second pass
    position = endless.state_dict()
    (position["begun"]["own"],) = position["begun"]["own"]
    states = generators.states()
    expected = bits(itertools.islice(endless, 9))
    again = Endless(with_generator(), "task")
    again.load_state_dict(position)
    generators.restore(states)
    assert bits(itertools.islice(again, 9)) == expected


def test_what_is_skipped_is_not_loaded():
    torch.manual_seed(1)
    endless = Endless(shuffled(), "task")
    list(itertools.islice(endless, 5))
    position = endless.state_dict()
    Numbers.loaded = 0
    again = Endless(shuffled(), "task")
    again.load_state_dict(position)
    next(again)
    assert Numbers.loaded == 3


def test_a_source_that_knows_its_position_is_asked():
    class Stateful:
        at = 0

        def __iter__(self):
            while True:
                self.at += 1
                yield self.at

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    endless = Endless(Stateful(), "task")
    assert endless.peek() == 1 and endless.state_dict()["source"] == {"at": 0}
    assert list(itertools.islice(endless, 4)) == [1, 2, 3, 4]
    again = Endless(Stateful(), "task")
    again.load_state_dict(endless.state_dict())
    assert next(again) == 5


def test_batches_are_asked_for_their_position_only_where_it_is_kept():
    class Costly(list):
        asked = 0

        def state_dict(self):
            self.asked += 1
            return {}

        def load_state_dict(self, state):
            pass

    for keeps, asked in ((False, 0), (True, 1)):
        batches = Costly([1, 2])
        endless = Endless(batches, "task", keeps_position=keeps)
        assert endless.peek() == 1
        assert list(itertools.islice(endless, 5)) == [1, 2, 1, 2, 1]
        assert batches.asked == asked


# Other numbers of ranks


def draw(endless, count):
    """Return the samples of a number of batches."""
    return [each for (batch,) in itertools.islice(endless, count) for each in batch.tolist()]


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 5), (3, 1), (1, 3)])
def test_the_rest_of_a_pass_is_dealt_without_repeats(before, after):
    """All samples that the first ranks have not drawn, and no other, are in the next batches."""
    ranks = [data.Batches(np.arange(rank, 61, before), 4, rank, 7) for rank in range(before)]
    seen = np.concatenate([next(each) for each in ranks for _ in range(3)])
    positions = [Endless(each, "task").state_dict() for each in ranks]
    rest = []
    for rank in range(after):
        endless = Endless(data.Batches(np.arange(rank, 61, after), 1, rank, 7), "task")
        endless.deal(positions, rank, after)
        left = 61 - len(seen)
        rest += itertools.islice(endless, left // after + (rank < left % after))
    assert sorted([*seen, *np.concatenate(rest)]) == list(range(61))


def test_what_workers_have_been_sent_ahead_is_dealt_as_well():
    def ranks(size):
        shards = [np.arange(rank, 60, size) for rank in range(size)]
        samplers = [data.Batches(each, 2, 0, 7, list) for each in shards]
        numbers = torch.arange(60)
        loaders = [DataLoader(numbers, batch_sampler=each, num_workers=1) for each in samplers]
        return [Endless(each, "task") for each in loaders]

    def numbers(endless, count):
        return torch.cat(list(itertools.islice(endless, count))).tolist()

    everyone = ranks(2)
    drawn = [each for endless in everyone for each in numbers(endless, 3)]
    (rest,) = ranks(1)
    rest.deal([endless.state_dict() for endless in everyone], 0, 1)
    assert sorted(drawn + numbers(rest, 24)) == list(range(60))


@pytest.mark.parametrize(("before", "between", "after"), [(4, 2, 3), (2, 4, 1), (1, 3, 2)])
def test_a_distributed_sampler_goes_on_in_its_order(before, between, after):
    """Twice with another number of ranks, and with a position in the rest that was dealt."""
    numbers = TensorDataset(torch.arange(96))

    def ranks(size):
        samplers = [DistributedSampler(numbers, size, rank, seed=3) for rank in range(size)]
        return [Endless(DataLoader(numbers, 2, sampler=each), "task") for each in samplers]

    drawn, sizes = [], (before, between, after)
    everyone = ranks(before)
    for size, following in itertools.pairwise((*sizes, after)):
        for endless in everyone:
            drawn += draw(endless, 3)
        positions = [endless.state_dict() for endless in everyone]
        again = ranks(size)
        for endless, position in zip(again, positions):
            endless.load_state_dict(position)
        everyone = ranks(following)
        if following == size:
            everyone = again
        else:
            for rank, endless in enumerate(everyone):
                endless.deal(positions, rank, following)
    assert len(drawn) == len(set(drawn)) == 6 * sum(sizes)
    left = 96 - len(drawn)
    for endless in everyone:
        drawn += draw(endless, left // (2 * after))
    assert sorted(drawn) == list(range(96))


@pytest.mark.parametrize("after", [1, 2, 3])
def test_no_sample_comes_again_where_ranks_have_drawn_unequally(after):
    numbers = TensorDataset(torch.arange(48))

    def ranks(size):
        samplers = [DistributedSampler(numbers, size, rank, shuffle=False) for rank in range(size)]
        return [Endless(DataLoader(numbers, 1, sampler=each), "task") for each in samplers]

    everyone = ranks(2)
    drawn = [each for endless, count in zip(everyone, (10, 6)) for each in draw(endless, count)]
    positions = [endless.state_dict() for endless in everyone]
    everyone = ranks(after)
    for rank, endless in enumerate(everyone):
        endless.deal(positions, rank, after)
    rest = [each for endless in everyone for each in draw(endless, 24 // after)]
    assert len(set(drawn + rest)) == len(drawn + rest) == 16 + 24


@pytest.mark.parametrize("after", [3, 4])
def test_what_ranks_have_drawn_that_have_died_is_left_out(after):
    """Ranks 0 to 2 know only that there were four; each has drawn as much as they."""
    numbers = TensorDataset(torch.arange(96))

    def ranks(size):
        samplers = [DistributedSampler(numbers, size, rank, shuffle=False) for rank in range(size)]
        return [Endless(DataLoader(numbers, 2, sampler=each), "task") for each in samplers]

    everyone = ranks(4)
    for endless in everyone:
        list(itertools.islice(endless, 5))
    positions = [endless.state_dict() for endless in everyone[:3]]
    rest = ranks(after)
    for rank, endless in enumerate(rest):
        endless.deal(positions, rank, after)
    drawn = [
        each for endless in rest for (batch,) in itertools.islice(endless, 3) for each in batch
    ]
    assert sorted(drawn) == list(range(40, 40 + 6 * after))


def test_other_loaders_begin_the_pass_anew_and_say_so(caplog):
    endless = Endless(listed(), "task")
    list(itertools.islice(endless, 3))
    again = Endless(listed(), "task")
    with caplog.at_level(logging.WARNING):
        again.deal([endless.state_dict()], 0, 1)
    assert next(again).item() == 0
    assert "task: the pass over the training batches begins anew" in caplog.text


def in_order(sampler):
    return DataLoader(torch.arange(100), batch_size=None, sampler=sampler)


ENDLESS = (
    lambda first: itertools.count(first),
    lambda first: in_order(itertools.cycle([first])),
    lambda first: DataLoader(torch.arange(100), batch_sampler=itertools.cycle([[first]])),
)


@pytest.mark.parametrize("make", ENDLESS)
@pytest.mark.parametrize("drawn", [0, 3])
def test_other_batches_follow_at_once_on_those_without_end(make, drawn):
    endless = Endless(make(0), "task")
    endless.peek()
    list(itertools.islice(endless, drawn))
    endless.renew(make(50))
    assert int(next(endless)) == 50


@pytest.mark.parametrize("make", [list, in_order])
def test_other_batches_follow_at_the_end_of_a_pass(make):
    endless = Endless(make([0, 1]), "task")
    first = next(endless)
    endless.renew(make([50]))
    assert [int(each) for each in (first, next(endless), next(endless))] == [0, 1, 50]


# Signals


# Workers get signals while they load elements, as from a batch system.
KILLED = """
import os, signal
from torch.utils.data import DataLoader, Dataset
from wagma.tasks import contract


class Killed(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        return index


def noted(worker):
    assert worker in (0, 1)


both = [DataLoader(Killed(), 2, num_workers=2, worker_init_fn=noted) for _ in range(2)]
task = contract.Task("task", None, lambda *_: both, None)
for batches in contract.deal(task, 0, 1, 2, 0):
    print([batch.tolist() for batch in batches])
"""


def dealt(training, test):
    """Return a task's batches as a rank of `wagma train` gets them."""
    task = contract.Task("task", None, lambda *_: (training, test), None)
    return contract.deal(task, 0, 1, 2, 0)


@pytest.mark.launch
def test_workers_outlive_the_signals_of_a_batch_system(mpirun):
    """Those that load test batches as well."""
    ended = mpirun(None, "-c", KILLED, timeout=60, forked=True).check()
    assert ended.stdout == 2 * "[[0, 1], [2, 3], [4, 5], [6, 7]]\n"


def test_a_worker_still_ends_when_its_rank_ends_it():
    batches, _ = dealt(DataLoader(Numbers(), 2, num_workers=1), [])
    iterator = iter(batches)
    next(iterator)
    (worker,) = iterator._workers
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == 0
    iterator._workers_done_event.set()
