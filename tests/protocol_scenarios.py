"""What the ranks of `protocol_network` do: their programs, and random ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from protocol_messages import all_ranks

from collectives.topology import shuffle

# What an application's program consists of, besides the operations AVERAGE, SYNCHRONIZE, JOIN and
# CLOSE, and a `Load`.
CALL = "call"
INTERRUPTED_CALL = "interrupted call"
# Under the conserving rule it contributes no change.
NONFINITE_CALL = "call with a vector that is not finite"
INTERRUPTED_NONFINITE_CALL = "interrupted call with a vector that is not finite"
PUBLISH = "publish"
# Tell the rank's part of the vector, which is what the application has then.
LEASE = "lease"
AVERAGE = all_ranks.AVERAGE
SYNCHRONIZE = all_ranks.SYNCHRONIZE
JOIN = all_ranks.JOIN
CLOSE = all_ranks.CLOSE


class Load(NamedTuple):
    """Replace the model by one of the rank's own, of which the next call has this number."""

    number: int


# When a rank sends the activations that are due.
AT_ONCE = "at once"
DELAYED = "delayed"
ONE_AT_A_TIME = "one at a time"


class Grouped:
    """The groups of a scenario's versions."""

    def group_of(self, rank, number):
        """Return the members of a rank's group in the version of this number."""
        if self.is_of_all(number):
            return list(range(self.world_size))
        return shuffle(self.world_size, self.group_size).members(rank, number)

    def is_of_all(self, number):
        """Return whether this version averages over all ranks as any other averages over groups."""
        return self.own_pace and (number + 1) % self.sync_period == 0


@dataclass(frozen=True)
class Scenario(Grouped):
    """What the ranks of a run do, and which of their applications stop for a while.

    Attributes:
        programs: what each rank's application does; the last operation is CLOSE.
        sends: when due activations are sent; a delayed one may be overtaken by a later one.
        frozen: the ranks whose applications stop, wherever they compute, after `frozen_from`
            events, until nothing more can happen without them.
        absent: the ranks whose applications never make a step; what waits for them is the end.
        failing: the ranks that at some moment give notice of a failure.
        heeds: whether an application closes, instead of going on, once it knows of a failure.
        conserving: the late rule; else the paper's.
        seed: of the ranks that are drawn to start the versions; None: anybody may.
        weighted: whether calls have different weights; `by_work`: and these add up.
        own_pace: whether ranks make any number of calls, and each `sync_period`-th version is of
            all ranks; then ranks are passive and the late rule conserving, without draws or work.
        partial: whether the vector has a second array, which only averages over all ranks average.
        lease: for how many versions a rank may publish nothing before its part expires; 0: always.
    """

    world_size: int
    group_size: int
    sync_period: int
    programs: tuple
    passive: bool = True
    conserving: bool = False
    sends: str = AT_ONCE
    frozen: frozenset = frozenset()
    frozen_from: int = 0
    absent: frozenset = frozenset()
    failing: frozenset = frozenset()
    heeds: bool = False
    seed: int | None = None
    weighted: bool = False
    by_work: bool = False
    own_pace: bool = False
    lease: int = 0
    partial: bool = False


def random_epoch(generator, calls):
    """Make the calls of one epoch, with some synchronous operations among them."""
    epoch = [CALL] * calls
    for _ in range(generator.choice((0, 0, 1, 2))):
        operation = generator.choice((AVERAGE, SYNCHRONIZE))
        epoch.insert(generator.randint(0, len(epoch)), operation)
    return epoch


def random_programs(generator, world_size, sync_period, kind, longest=14):
    """Make one program a rank.

    They are all "equal", or of "unequal" lengths, or consist of epochs that a rank may "join" the
    end of early, or there is a "mismatch" or a "mismatched join".
    """
    most = 3 * sync_period if sync_period < 8 else longest
    joining = kind in ("join", "mismatched join")
    epochs = []
    for _ in range(generator.randint(1, 3) if joining else 1):
        epoch = random_epoch(generator, generator.randint(0, min(most, 8) if joining else most))
        if generator.random() < 0.2:
            load = Load(generator.randint(0, min(2 * sync_period, 20)))
            epoch.insert(generator.randint(0, 0 if joining else len(epoch)), load)
        epochs.append(epoch)
    programs = []
    for _ in range(world_size):
        program = []
        for epoch in epochs:
            length = len(epoch)
            if epoch and (kind == "unequal" or (joining and generator.random() < 0.5)):
                length = generator.randint(isinstance(epoch[0], Load), length)
            program += epoch[:length]
            program += [JOIN] * joining
        if kind.startswith("mismatch") and generator.random() < 0.3:
            operation = generator.choice((CALL, AVERAGE, SYNCHRONIZE, JOIN, Load(0)))
            program.insert(generator.randint(0, len(program)), operation)
        for _ in range(generator.choice((0, 0, 1, 2))):
            program.insert(generator.randint(0, len(program)), PUBLISH)
        if CALL in program and generator.random() < 0.2:
            calls = [index for index, operation in enumerate(program) if operation == CALL]
            program[generator.choice(calls)] = INTERRUPTED_CALL
        programs.append((*program, CLOSE))
    return tuple(programs)


def random_scenario(generator):
    world_size = generator.randint(1, 9)
    sync_period = generator.choice((1, 2, 3, 4, 5, 100))
    kind = generator.choice(
        ("equal", "equal", "unequal", "mismatch", "join", "join", "join", "mismatched join")
    )
    return Scenario(
        world_size,
        group_size=generator.randint(1, world_size),
        sync_period=sync_period,
        programs=random_programs(generator, world_size, sync_period, kind),
        passive=generator.random() < 0.75,
        conserving=generator.choice((False, True)),
        sends=generator.choice((AT_ONCE, DELAYED, ONE_AT_A_TIME)),
        frozen=random_ranks(generator, world_size, (0, 0.4)),
        frozen_from=generator.randint(0, 60 * world_size),
        failing=random_ranks(generator, world_size, (0, 0, 0, 0.2, 1)),
        heeds=generator.random() < 0.5,
        absent=random_ranks(generator, world_size, (0, 0, 0, 0, 0.2)),
    )


def random_drawn_scenario(generator):
    """Make a random scenario in which each version is started by the rank drawn for it.

    All ranks are one group, and anybody is passive.
    """
    scenario = random_scenario(generator)
    return replace(
        scenario, group_size=scenario.world_size, passive=True, seed=generator.getrandbits(64)
    )


def random_weighted_scenario(generator):
    """Make a random scenario in which ranks' vectors have weights, and no update may be lost."""
    scenario = random_scenario(generator)
    kind = generator.choice(("equal", "unequal"))
    size, period = scenario.world_size, scenario.sync_period
    return replace(
        scenario,
        programs=random_programs(generator, size, period, kind),
        passive=True,
        conserving=True,
        weighted=True,
        by_work=generator.random() < 0.5,
    )


def random_own_pace_programs(generator, world_size, leases):
    """Make one program a rank: the same operations, and any number of calls between them.

    For nine calls there are so many `leases`.

    Where some join, others go on to average; ranks may close earlier or later than others.
    """
    operations = (AVERAGE, SYNCHRONIZE, JOIN, JOIN, Load(generator.randint(0, 20)))
    epochs = [generator.choice(operations) for _ in range(generator.choice((0, 1, 1, 2)))]
    epochs = [
        [generator.choice((AVERAGE, SYNCHRONIZE)) for _ in range(generator.randint(0, 2))] + [last]
        for last in (*epochs, CLOSE)
    ]
    mismatched = generator.random() < 0.1
    programs = []
    for _ in range(world_size):
        program, busy = [], generator.choice((0, 1, 3, 3, 6))
        for *averages, last in epochs:
            made = generator.randint(0, len(averages)) if last == JOIN else len(averages)
            for operation in (*averages[:made], last):
                calls = generator.randint(0, busy)
                kinds = CALL, INTERRUPTED_CALL, NONFINITE_CALL, PUBLISH, LEASE
                program += generator.choices(kinds, (9, 1, 1, 1, leases), k=calls)
                program.append(operation)
        if mismatched and generator.random() < 0.3:
            operation = generator.choice((AVERAGE, SYNCHRONIZE, JOIN, Load(0)))
            program.insert(generator.randrange(len(program)), operation)
        programs.append(tuple(program))
    return tuple(programs)


def random_own_pace_scenario(generator):
    """Make a random scenario in which each of up to 16 ranks makes as many calls as it likes."""
    scenario = random_scenario(generator)
    world_size = generator.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9, 12, 16))
    lease = generator.choice((0, 0, 1, 2, 4))
    return replace(
        scenario,
        world_size=world_size,
        group_size=min(generator.choice((1, 2, 2, 3, 4, 16)), world_size),
        programs=random_own_pace_programs(generator, world_size, 2 * (lease > 0)),
        passive=True,
        conserving=True,
        frozen=random_ranks(generator, world_size, (0, 0.4)),
        frozen_from=generator.randint(0, 40 * world_size),
        failing=random_ranks(generator, world_size, (0, 0, 0, 0.2, 1)),
        absent=random_ranks(generator, world_size, (0, 0, 0, 0, 0.2)),
        own_pace=True,
        lease=lease,
        partial=generator.random() < 0.5,
    )


def random_partial_scenario(generator):
    """Make a random scenario whose vectors have a second array, under the conserving rule."""
    return replace(random_scenario(generator), conserving=True, partial=True)


def random_nonfinite_scenario(generator):
    """Make one without passive ranks, some of whose calls have nothing to contribute.

    Nor have their ranks' snapshots, after the first call. So these contribute no earlier vector
    instead, and no change is left out.
    """
    scenario = random_partial_scenario(generator)
    kinds = CALL, NONFINITE_CALL, INTERRUPTED_NONFINITE_CALL
    calls = generator.randint(2, 6)
    programs = tuple(
        (CALL, *generator.choices(kinds, k=calls), CALL, CLOSE) for _ in range(scenario.world_size)
    )
    return replace(scenario, programs=programs, passive=False, sync_period=100)


def random_ranks(generator, world_size, probabilities):
    """Choose each rank with a probability that is one of these."""
    probability = generator.choice(probabilities)
    return frozenset(rank for rank in range(world_size) if generator.random() < probability)
