"""Cases whose results repeat bit for bit, on every machine and with every MPI, and their digests.

`python -m tests.bits` plays them all, twice with each number of ranks, and writes the fixture anew.

Nothing here is more than an elementwise sum, or product with a power of two, of numbers from a
counter-based generator. What depends on who comes first is digested only where sums are exact.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import networkx
import numpy as np
import torch
from torch import nn

from collectives import (
    GroupAllreduce,
    NeighborAverage,
    PairwiseAverage,
    ParameterServer,
    PartialAllreduce,
    PushSum,
)
from wagma import optim

FIXTURE = Path(__file__).parent / "fixtures" / "bits.json"
SIZES = (4, 8)
TRANSPORTS = ("messages", "shared")
RULES = ("paper", "conserving")
KINDS = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
# Bytes of an array. Only the long ones go in slices; by messages, medium ones still go whole.
SHORT, MEDIUM, LONG = 150, 100 << 10, 600 << 10
FINE, COARSE = 24, 7  # random bits of a number; sums of the coarse ones are exact
NEVER = 10**9

CASES = {}


class Case(NamedTuple):
    """What is played.

    Args:
        play: generator, of a communicator, of what is digested.
        transports: those that it is played with.
    """

    play: Callable
    transports: tuple[str, ...]


def add(name, play, *arguments, transports=TRANSPORTS, **settings):
    """Add a case of a generator that is called with the communicator and these."""
    assert name not in CASES
    CASES[name] = Case(lambda comm: play(comm, *arguments, **settings), transports)


def digest(name, comm) -> str:
    """Play a case, and return the digest of this rank's vectors and results."""
    state = hashlib.blake2b(digest_size=8)
    for thing in CASES[name].play(comm):
        state.update(memory_of(thing))
    return state.hexdigest()


def memory_of(thing) -> bytes:
    if isinstance(thing, np.ndarray):
        return thing.tobytes()
    if hasattr(thing, "synchronized"):
        fields = (
            int(thing.version),
            bool(thing.timely),
            int(thing.source),
            tuple(map(int, thing.group)),
            float(thing.weight),
            bool(thing.synchronized),
        )
        return repr(fields).encode()
    if isinstance(thing, torch.Tensor):
        return thing.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(thing, (list, tuple)):
        return b"".join(map(memory_of, thing))
    return repr(thing).encode()


# Numbers


@functools.cache
def drawn(bits):
    """Return more numbers from −1 to 1 than a vector has: float64 multiples of 2^(1 − bits)."""
    integers = np.random.Philox(key=0).random_raw(1 << 19) >> np.uint64(64 - bits)
    return integers.astype(np.float64) / 2.0 ** (bits - 1) - 1


def numbers(length, rank, t, index, bits=FINE):
    """Return some of them, others for every rank, time and array."""
    everything = drawn(bits)
    first = (7919 * rank + 104729 * t + 15485863 * index) % (everything.size - length)
    return everything[first : first + length]


def new_vector(kinds, size, *key, bits=FINE):
    """Return a list of arrays of about `size` bytes together."""
    lengths = [size // len(kinds) // KINDS[kind].itemsize + 3 for kind in kinds]
    return [
        numbers(length, *key, index, bits).astype(KINDS[kind])
        for index, (kind, length) in enumerate(zip(kinds, lengths))
    ]


def change(vector, *key, bits=FINE):
    for index, array in enumerate(vector):
        array += numbers(array.size, *key, index, bits).astype(array.dtype)


def copied(vector):
    return [array.copy() for array in vector]


# GroupAllreduce


def call_group(comm, kinds, size, calls, before=lambda *_: 1.0, same_start=False, **settings):
    """Call, with what `before(vector, rank, t)` returns as the weight."""
    mine = new_vector(kinds, size, 0 if same_start else comm.rank, 0)
    with GroupAllreduce(comm, mine, wait="group", **settings) as average:
        for t in range(1, calls + 1):
            change(mine, comm.rank, t)
            yield average(mine, weight=before(mine, comm.rank, t)), mine


def call_group_with_one_array(comm, kind, size, calls, **settings):
    [mine] = new_vector([kind], size, comm.rank, 0)
    with GroupAllreduce(comm, mine, wait="group", **settings) as average:
        for t in range(1, calls + 1):
            change([mine], comm.rank, t)
            yield average(mine), mine


def unequal_weight(vector, rank, t):
    return (rank + t) % 5 / 3


def spoil(vector, rank, t):
    """Give a rank's vector something infinite or none at all; periods of 3 see all of it."""
    if t % 2 and rank == 1:
        vector[0][1] = np.inf
    if t % 4 == 0 and rank == 2:
        vector[-1][2] = np.nan
    return 1.0 + rank % 2


def do_all_with_groups(comm, kinds, size, **settings):
    """Every operation between the calls."""
    mine = new_vector(kinds, size, comm.rank, 0)
    with GroupAllreduce(comm, mine, wait="group", **settings) as average:
        for t in range(1, 31):
            change(mine, comm.rank, t)
            if t % 4 == 0:
                handle = average.start(mine, weight=1.0 + comm.rank)
                yield handle.wait(), mine
            else:
                yield average(mine, weight=1.0 + t % 3), mine
            if t % 5 == 0:
                shown = copied(mine)
                average.average(shown)
                yield shown
            if t % 7 == 0:
                change(mine, comm.rank, 100 + t)
                average.synchronize(mine)
                yield mine
            if t % 11 == 0:
                change(mine, comm.rank, 200 + t)
                average.publish(mine, weight=2.0)
                yield mine
            if t == 17:
                change(mine, comm.rank, 300 + t)
                average.load(mine, 5)
                yield mine, average.version


def join_groups(comm, kinds, size, **settings):
    mine = new_vector(kinds, size, comm.rank, 0)
    with GroupAllreduce(comm, mine, wait="group", **settings) as average:
        for epoch in range(3):
            for t in range((5 * comm.rank + 3 * epoch) % 9):
                change(mine, comm.rank, 20 * epoch + t + 1)
                yield average(mine, weight=1.0 + comm.rank % 3), mine
            average.join(mine)
            yield mine, average.version


def close_groups_early(comm, kinds, size, **settings):
    mine = new_vector(kinds, size, comm.rank, 0)
    with GroupAllreduce(comm, mine, wait="group", sync_period=NEVER, **settings) as average:
        for t in range(1, 4 + 5 * comm.rank % 7):
            change(mine, comm.rank, t)
            yield average(mine), mine
    yield mine


def conserve_with_groups(comm, **settings):
    """Nobody waits, but nothing is lost: what all have after a period is exact."""
    mine = new_vector(["float64", "float32"], SHORT, comm.rank, 0, bits=COARSE)
    with GroupAllreduce(comm, mine, sync_period=3, late="conserving", **settings) as average:
        average.synchronize(mine)
        for t in range(1, 10):
            change(mine, comm.rank, t, bits=COARSE)
            # A float32 does not hold more bits.
            if average(mine).synchronized and t < 4:
                yield mine
            elif t % 3 == 0:
                yield mine[0]
        average.join(mine)
        yield mine[0]


EVERY_KIND = tuple(KINDS)
MIXED = ("float32", "float16", "float64")
MESSAGES, SHARED = (
    ("messages",),
    ("shared",),
)  # of what one alone has an effect on, or is enough for

for group_size, period, groups in product((2, 3, 4), (3, 10), ("fixed", "changing")):
    late = RULES[(group_size + (groups == "fixed")) % 2]
    add(
        f"groups of {group_size}, {groups}, period {period}, {late}",
        *(call_group, EVERY_KIND, SHORT, 13),
        group_size=group_size,
        sync_period=period,
        groups=groups,
        late=late,
    )
for i, kind in enumerate(KINDS):
    size, calls = ((MEDIUM, 7), (LONG, 4))[i % 2]
    add(
        f"groups, one {kind} array, {size} bytes",
        *(call_group_with_one_array, kind, size, calls),
        group_size=4,
        sync_period=3,
    )
for group_size in (2, 3, 4):
    add(
        f"groups of {group_size}, long",
        *(call_group, EVERY_KIND, LONG, 4),
        group_size=group_size,
        sync_period=3,
        late=RULES[group_size % 2],
    )
for i, wire in enumerate(("float16", "bfloat16")):
    for group_size, size, calls in ((2, SHORT, 13), (3, SHORT, 13), (3 + i, 2 * LONG, 4)):
        add(
            f"groups of {group_size}, {size} bytes as {wire}",
            *(call_group, MIXED, size, calls),
            same_start=group_size == 2,
            transports=MESSAGES,
            group_size=group_size,
            sync_period=3,
            wire_dtype=wire,
        )
for late, (size, calls) in zip(RULES, ((SHORT, 13), (LONG, 5))):
    arguments = call_group, EVERY_KIND, size, calls
    settings = {"group_size": 4, "sync_period": 3, "late": late}
    add(f"groups, weights, {size} bytes", *arguments, before=unequal_weight, **settings)
    add(f"groups, not finite, {size} bytes", *arguments, before=spoil, **settings)
for late in RULES:
    settings = {"group_size": 2, "late": late}
    add(f"groups, operations, {late}", do_all_with_groups, MIXED, SHORT, sync_period=10, **settings)
    for group_size in (2, 3, 4):
        settings = {"group_size": group_size, "late": late, "sync_period": group_size + 1}
        add(f"groups of {group_size}, join, {late}", join_groups, MIXED, SHORT, **settings)
    settings = {"group_size": 3, "late": late}
    add(f"groups, close early, {late}", close_groups_early, MIXED, SHORT, **settings)
settings = {"group_size": 2, "wire_dtype": "float16", "transports": MESSAGES}
add("groups, operations, as float16", do_all_with_groups, MIXED, SHORT, sync_period=10, **settings)
add("groups, join, as float16", join_groups, MIXED, SHORT, sync_period=3, **settings)
add(
    "groups, no thread",
    *(call_group, EVERY_KIND, MEDIUM, 7),
    before=unequal_weight,
    group_size=4,
    sync_period=3,
    engine="none",
)
for engine in ("adaptive", "none"):
    add(f"groups, nobody waits, {engine}", conserve_with_groups, group_size=2, engine=engine)


# PartialAllreduce


def put_in(comm, kinds, size, calls, **settings):
    """All wait for all in every call."""
    mine = new_vector(kinds, size, comm.rank, 0)
    with PartialAllreduce(comm, mine, sync_period=1, **settings) as partial:
        for t in range(1, calls + 1):
            mine = new_vector(kinds, size, comm.rank, t)
            if t % 5 == 0 and comm.rank == 1:
                mine[0][0] = np.nan
            yield partial(mine), mine
            if t % 4 == 0:
                shown = new_vector(kinds, size, comm.rank, 100 + t)
                partial.average(shown)
                yield shown
            if t % 6 == 0:
                mine = new_vector(kinds, size, comm.rank, 200 + t)
                partial.synchronize(mine)
                yield mine


def put_in_exactly(comm, kinds, **settings):
    """What a period brings is exact, and the same whoever is late."""
    mine = new_vector(kinds, SHORT, comm.rank, 0)
    with PartialAllreduce(comm, mine, sync_period=5, **settings) as partial:
        sums = [np.zeros_like(array) for array in mine]
        for t in range(1, 21):
            mine = new_vector(kinds, SHORT, comm.rank, t, bits=COARSE)
            result = partial(mine)
            for total, array in zip(sums, mine):
                total += array
            if result.synchronized:
                yield sums
                sums = [np.zeros_like(array) for array in mine]


add("partial, short", put_in, EVERY_KIND, SHORT, 13)
add("partial, long", put_in, EVERY_KIND, LONG, 4)
for trigger in ("solo", "majority"):
    add(f"partial, {trigger}", put_in_exactly, ["float32", "float64"], trigger=trigger)


# From rank to rank


def exactly_mixed(size):
    """The ring's matrix with which sums are exact."""
    ring = np.roll(np.eye(size), 1, axis=0)
    return (2 * np.eye(size) + ring + ring.T) / 4


def send_to_peers(comm, make, kinds, size, calls, bits, ends_only):
    """Call, with all other operations in between unless only the last counts."""
    mine = new_vector(kinds, size, comm.rank, 0, bits=bits)
    with make(comm, mine) as peers:
        for t in range(1, calls + 1):
            change(mine, comm.rank, t, bits=bits)
            result = peers(mine)
            if ends_only:
                continue
            yield result, mine
            if t % 5 == 0:
                shown = copied(mine)
                peers.average(shown)
                yield shown
            if t % 7 == 0:
                change(mine, comm.rank, 100 + t, bits=bits)
                peers.synchronize(mine)
                yield mine
            if t == 9:
                peers.load(mine, 40)
                yield mine, peers.version
        peers.synchronize(mine)
        yield mine


def add_peers(name, make, kinds=EVERY_KIND, size=SHORT, calls=13, bits=FINE, ends_only=False):
    add(name, send_to_peers, make, kinds, size, calls, bits, ends_only, transports=MESSAGES)


def join_peers(comm, make, kinds):
    """What all have then is exact."""
    mine = new_vector(kinds, SHORT, comm.rank, 0, bits=COARSE)
    with make(comm, mine) as peers:
        for epoch in range(2):
            for t in range((5 * comm.rank + 3 * epoch) % 6):
                change(mine, comm.rank, 10 * epoch + t + 1, bits=COARSE)
                peers(mine)
            peers.join(mine)
            yield mine, peers.version


GRAPHS = {
    "ring": lambda size: None,
    "star": lambda size: networkx.star_graph(size - 1),
    "path": lambda size: networkx.path_graph(size),
    "one way": lambda size: networkx.cycle_graph(size, networkx.DiGraph),
}


def neighbors(graph, **settings):
    return lambda comm, like: NeighborAverage(
        comm, like, graph=GRAPHS[graph](comm.size), **settings
    )


def mixing(comm, like):
    return NeighborAverage(comm, like, mixing=exactly_mixed(comm.size))


def push_sum(count, weigh=False):
    """Rank to so many others; 4 stands for as many as there can be."""

    def make(comm, like):
        count_here = min(count, (comm.size - 1).bit_length())
        weight = 1 + comm.rank / 2 if weigh else 1.0
        return PushSum(comm, like, neighbors=count_here, weight=weight)

    return make


def push_sum_along(graph):
    return lambda comm, like: PushSum(comm, like, graph=GRAPHS[graph](comm.size))


def server(**settings):
    return lambda comm, like: ParameterServer(comm, like, **settings)


for graph, clock in (
    ("ring", "neighbors"),
    ("ring", "global"),
    ("star", "neighbors"),
    ("path", "global"),
    ("one way", "neighbors"),
):
    add_peers(f"neighbors, {graph}, clock {clock}", neighbors(graph, clock=clock))
add_peers("neighbors, long", neighbors("ring"), size=LONG, calls=3)
add_peers("neighbors, mixing given", mixing, MIXED)
add("neighbors, join", join_peers, mixing, ["float64"], transports=MESSAGES)
for count, weigh in ((1, False), (2, True), (4, False)):
    add_peers(f"push-sum to {count}", push_sum(count, weigh))
add_peers("push-sum, long", push_sum(1), size=LONG, calls=3)
add_peers("push-sum, star", push_sum_along("star"))
for rank in (0, 2):
    add_peers(f"server on {rank}", server(server=rank), ["float64"], bits=COARSE)
add_peers("server, long", server(), ["float64"], LONG, 3, COARSE)
add("server, join", join_peers, server(), ["float64", "float32"], transports=MESSAGES)
for name, make in (("asynchronous server", server(mode="asp")), ("pairs", PairwiseAverage)):
    add_peers(name, make, ["float64"], SHORT, 4, COARSE, ends_only=True)


# Optimizers


class Model(nn.Module):
    """Parameters of several dtypes, statistics and a counter, with gradients that are made up.

    Args:
        exact: whether gradients do not depend on the model, and all sums are exact.
    """

    def __init__(self, rank, exact):
        super().__init__()
        self.rank, self.bits = rank, COARSE if exact else FINE
        self.exact = exact
        small = torch.float64 if exact else torch.bfloat16
        usual = torch.float64 if exact else torch.float32
        self.weight = nn.Parameter(self.random(40, 0, 0).to(usual).view(5, 8))
        self.bias = nn.Parameter(self.random(5, 0, 1).double())
        self.small = nn.Parameter(self.random(7, 0, 2).to(small))
        self.register_buffer("mean", self.random(8, 0, 3).to(usual))
        self.register_buffer("count", torch.tensor(rank))

    def random(self, length, t, index):
        return torch.tensor(numbers(length, self.rank, t, index, self.bits))

    @torch.no_grad()
    def backward(self, t):
        """Leave gradients in the parameters; the bias has none on some ranks."""
        for index, parameter in enumerate(self.parameters()):
            noise = self.random(parameter.numel(), t, index).to(parameter.dtype)
            if index == 1 and (self.rank + t) % 3 == 0:
                parameter.grad = None
            else:
                own = 0 if self.exact else 0.5 * parameter
                parameter.grad = noise.view(parameter.shape) + own
        self.mean.add_(self.random(8, t, 3).to(self.mean.dtype))
        self.count.add_(1)


def make(comm, kind, exact=False, **settings):
    """Return a model, its optimizer, whose steps are the same with fused products, and averager."""
    model = Model(comm.rank, exact)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0 if exact else 0.5)
    return model, optimizer, kind(model, optimizer, comm=comm, **settings)


def state_of(model, optimizer):
    momentum = [value for entry in optimizer.state.values() for value in entry.values()]
    return [*model.state_dict().values(), *(value for value in momentum if value is not None)]


def train(comm, kind, weigh=False, **settings):
    """Steps, with all other operations in between."""
    model, optimizer, averager = make(comm, kind, **settings)

    def step(t):
        model.backward(t)
        averager.weight = 1 + (comm.rank + t) % 3 / 2 if weigh else 1
        optimizer.step()

    with averager:
        for t in range(1, 13):
            step(t)
            yield averager.result, state_of(model, optimizer)
            if t % 5 == 0:
                with averager.averaged():
                    yield state_of(model, optimizer)
            if t == 6:
                averager.synchronize()
                yield state_of(model, optimizer)
            if t == 9:
                averager.complete()
                saved = copy.deepcopy(model.state_dict()), averager.state_dict()
        model.load_state_dict(saved[0])
        averager.load_state_dict(saved[1])
        step(13)
        averager.complete()
        yield averager.result, state_of(model, optimizer)
        with averager.join():
            for t in range(5 * comm.rank % 7):
                step(14 + t)
        yield state_of(model, optimizer)
    yield state_of(model, optimizer)


def train_exactly(comm, kind, steps, **settings):
    """Only what all have in the end is digested."""
    model, optimizer, averager = make(comm, kind, exact=True, **settings)
    with averager:
        for t in range(1, steps + 1):
            model.backward(t)
            optimizer.step()
        averager.synchronize()
        # The mean of WAGMA's buffers is of those that came in time.
        yield list(model.parameters()) if kind is optim.WAGMA else state_of(model, optimizer)


METHODS = {
    "WAGMA": (optim.WAGMA, {"sync_period": 4, "wait": "group", "late": "conserving"}),
    "WAGMA paper": (optim.WAGMA, {"sync_period": 4, "wait": "group", "late": "paper"}),
    "WAGMA overlap": (optim.WAGMA, {"sync_period": 4, "wait": "group", "overlap": True}),
    "WAGMA fixed": (
        optim.WAGMA,
        {"group_size": 3, "sync_period": 4, "wait": "group", "groups": "fixed"},
    ),
    "WAGMA wire": (
        optim.WAGMA,
        {"group_size": 4, "sync_period": 4, "wait": "group", "wire_dtype": torch.bfloat16},
    ),
    "Allreduce": (optim.Allreduce, {}),
    "LocalSGD": (optim.LocalSGD, {"sync_period": 4}),
    "DPSGD": (optim.DPSGD, {}),
    "DPSGD global": (optim.DPSGD, {"clock": "global"}),
    "SGP": (optim.SGP, {}),
    "SGP 2": (optim.SGP, {"neighbors": 2}),
    "EagerSGD": (optim.EagerSGD, {"sync_period": 1}),
}
# What always sends messages, whatever the transport.
PEERS = (optim.DPSGD, optim.SGP, optim.ParameterServer, optim.ADPSGD)
for name, (kind, settings) in METHODS.items():
    weigh = kind in (optim.WAGMA, optim.Allreduce, optim.LocalSGD)
    by_messages = "wire_dtype" in settings or kind in PEERS
    transports = MESSAGES if by_messages else SHARED
    add(f"train {name}", train, kind, weigh, transports=transports, **settings)
for name, kind, steps, settings in (
    ("WAGMA", optim.WAGMA, 9, {"sync_period": 4}),
    ("EagerSGD", optim.EagerSGD, 12, {"sync_period": 4}),
    ("EagerSGD majority", optim.EagerSGD, 12, {"sync_period": 4, "trigger": "majority"}),
    ("ParameterServer", optim.ParameterServer, 12, {}),
    ("ParameterServer asp", optim.ParameterServer, 12, {"mode": "asp"}),
    ("ADPSGD", optim.ADPSGD, 4, {}),
):
    transports = MESSAGES if kind in PEERS else SHARED
    add(f"train {name}, exact", train_exactly, kind, steps, transports=transports, **settings)


# The fixture


def play(comm) -> dict:
    """Return the digests of all cases: for each a transport's, of all ranks in turn."""
    played = {name: {} for name in CASES}
    for name, case in CASES.items():
        for transport in case.transports:
            os.environ["WAGMA_TRANSPORT"] = transport
            played[name][transport] = " ".join(comm.allgather(digest(name, comm)))
    return played


def expected(size, name, transport, rank) -> str:
    """Return what the fixture has as one rank's digest of a case."""
    of_ranks = fixture()[str(size)][name]
    return (of_ranks if isinstance(of_ranks, str) else of_ranks[transport]).split()[rank]


@functools.cache
def fixture() -> dict:
    return json.loads(FIXTURE.read_text())


def play_alone(size) -> dict:
    """Return what `play` returns in a job of its own."""
    from launch import OPEN_MPI, mpiexec

    command = [*mpiexec(), "-n", str(size), sys.executable, "-m", "tests.bits", "--play"]
    env = {**OPEN_MPI, "OMP_NUM_THREADS": "1", **os.environ}
    output = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output)


def write() -> int:
    """Write the fixture; return the exit status: 1 where something does not repeat."""
    written, failed = {}, False
    for size in SIZES:
        first, second = play_alone(size), play_alone(size)
        for name, played in first.items():
            if played != second[name]:
                print(f"{size} ranks: {name!r} differs from one run to the other")
                failed = True
        written[str(size)] = {
            name: played if len({*played.values()}) > 1 else next(iter(played.values()))
            for name, played in first.items()
        }
    if not failed:
        FIXTURE.parent.mkdir(exist_ok=True)
        FIXTURE.write_text(json.dumps(written, indent=1) + "\n")
    return int(failed)


def main() -> int:
    if "--play" not in sys.argv:
        return write()
    from mpi4py import MPI

    played = play(MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(played))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
