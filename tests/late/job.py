"""Average vectors with passes that are deferred, and with those that are not: the same bits?

    mpiexec -n 4 python tests/late/job.py EXTENSION [lying]

Rank 0 prints how many calls gave other bits, and how many passes were deferred.
"""

import importlib.util
import itertools
import sys

import numpy as np
from mpi4py import MPI

from collectives import GroupAllreduce, TriggeredAverage
from collectives.memory import space

comm = MPI.COMM_WORLD
# Of several blocks; of one, in several arrays, some with fewer elements than there are members.
LENGTHS = ([300_001], [60_000, 1, 3])
SETTINGS = (
    {"late": "conserving"},
    {"late": "paper"},
    {"wire_dtype": "float16"},
    {"engine": "none"},
    {"overlap": True},
)


def averages(lengths, settings, after):
    """Return what a rank has after each of some calls of all kinds."""
    found = []
    settings = dict(settings)
    overlap = settings.pop("overlap", False)
    rng = np.random.default_rng(comm.rank)
    vectors = [rng.standard_normal(length).astype(np.float32) for length in lengths]

    def note():
        found.append([vector.copy() for vector in vectors])
        after()

    def change():
        for vector in vectors:
            vector += rng.standard_normal(len(vector)).astype(np.float32)

    groups = {"group_size": 2, "sync_period": 3, "wait": "group", "transport": "messages"}
    with GroupAllreduce(comm, vectors, **groups, **settings) as allreduce:
        after()
        for call in range(4):
            change()
            allreduce.start(vectors).wait() if overlap else allreduce(vectors)
            note()
            if call == 2 and comm.rank == 1:
                vectors[0][0] = np.nan  # it is left out, and made finite again
        allreduce.average(vectors)
        note()
    if "late" not in settings:
        settings = {"sync_period": 1, "transport": "messages", **settings}
        with TriggeredAverage(comm, vectors, **settings) as triggered:
            after()
            for _ in range(3):
                change()
                triggered(vectors)
                note()
    return found


def main(extension, lying=""):
    spec = importlib.util.spec_from_file_location("late_space", extension)
    late = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(late)
    late.lying = bool(lying)
    space.make, differing = late.make, 0
    # One setting shows whether what is sent too early is seen.
    for lengths, settings in itertools.product(LENGTHS, [{}] if lying else SETTINGS):
        late.prompt = True
        expected = averages(lengths, settings, late.make_all)
        late.prompt = False
        found = averages(lengths, settings, late.make_all)
        for ours, theirs in zip(found, expected, strict=True):
            same = all((a.view(np.uint32) == b.view(np.uint32)).all() for a, b in zip(ours, theirs))
            differing += not comm.allreduce(same, op=MPI.LAND)
    deferred = comm.allreduce(late.make_all(), op=MPI.MIN)
    if comm.rank == 0:
        print(f"{differing} calls differ, {deferred} passes deferred")


if __name__ == "__main__":
    main(*sys.argv[1:])
