"""Checkpoints of every method at every place of a period, with one rank late."""

from __future__ import annotations

import time

import pytest
from methods import METHODS, Method, backward, bits_of, local_bits, make_model

from wagma import checkpoint
from wagma.optim import WAGMA, ParameterServer, PartialReduce

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3, 4), pytest.mark.transports("shared")]

LATEST = 0.02  # seconds that a late rank lets others go on, if their steps may need its own
ALL = METHODS | {
    "wagma-own-pace": Method(WAGMA, {"sync_period": 4, "pace": "own"}),
    "backup": Method(ParameterServer, {"mode": "backup", "backups": 1}),
    "partial-reduce-2": Method(PartialReduce, {"group_size": 2}),
}


class Late:
    """Lets one rank make its steps when the others have come to the end of theirs, if they can."""

    def __init__(self, comm, rank):
        self.comm, self.is_late = comm.Dup(), rank == comm.rank
        self.others = [each for each in range(comm.size) if each != rank]
        self.rank, self.sent, self.ends = rank, [], 0

    def steps(self, model, averager, numbers):
        (optimizer,) = averager.optimizers.given
        for number in numbers:
            self.wait()
            backward(model, self.comm.rank, number)
            optimizer.step()
        if not self.is_late:
            self.sent.append(self.comm.isend(None, self.rank, tag=self.ends))
        self.ends += 1

    def wait(self):
        until = time.monotonic() + LATEST * self.is_late
        while time.monotonic() < until and not all(
            self.comm.iprobe(each, tag=self.ends) for each in self.others
        ):
            time.sleep(0.001)

    def close(self):
        for end in range(self.ends * self.is_late):
            for each in self.others:
                self.comm.recv(source=each, tag=end)
        for request in self.sent:
            request.wait()
        self.comm.Free()


@pytest.mark.parametrize("method", ALL.values(), ids=ALL)
def test_all_can_save_and_load_wherever_they_stand(comm, tmp_path, method):
    """Also while others make steps, and beside a checkpoint that is being written."""
    directory = comm.bcast(tmp_path / "checkpoints")
    for count in range(1, 6):
        model, late = make_model(comm.rank), Late(comm, count % comm.size)
        with method.training(model, comm) as (optimizer, averager):
            with checkpoint.Saver(directory, averager, keep=1) as saver:
                late.steps(model, averager, range(count))
                saver.begin()
                late.steps(model, averager, [count])
                saver.begin()
                at_save = bits_of(model), local_bits(optimizer)
                # So many that the late rank begins an average, with trigger="solo".
                late.steps(model, averager, range(count + 1, 9 if count == 1 else count + 2))
            late.steps(model, averager, [9])
            found = checkpoint.load(directory, averager)
            assert found.step == averager.steps == count + 1
            assert (bits_of(model), local_bits(optimizer)) == at_save
            assert len(set(comm.allgather(at_save[0]))) == 1
        late.close()
