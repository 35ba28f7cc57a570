"""Variants of the protocol that look right and are not: the invariants catch each of them."""

from dataclasses import dataclass

import pytest
from protocol_network import (
    AT_ONCE,
    AVERAGE,
    CALL,
    CLOSE,
    DELAYED,
    Application,
    Invariant,
    Rank,
    Scenario,
    Stage,
    Violation,
    protocols,
    random_scenario,
    run_seed,
)

WaitAvoiding = protocols.WaitAvoiding


class ForwardsOnlyTheFirst(WaitAvoiding):
    """A version is forwarded only when it is first heard of."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.heard = ()

    def tell(self, version, ops, dimension):
        if version in self.heard:
            dimension = self.dimensions
        self.heard += (version,)
        super().tell(version, ops, dimension)


class TimelyUntilExecuted(WaitAvoiding):
    """A call is timely while its version has not been executed, although it may be running."""

    def call(self):
        super().call()
        self.timely = self.next == self.t


class NoGate(WaitAvoiding):
    """Versions are executed also before the synchronisation that they came after has ended."""

    def run(self):
        self.told_ops = min(self.told_ops, self.ops)
        if self.stage == protocols.MOVING and self.vectors == protocols.HELD:
            self.vectors = protocols.IDLE
        super().run()


class VersionFromTag(WaitAvoiding):
    """The version of an activation is the one nearest to the last that has its tag modulo 16."""

    def tell(self, version, ops, dimension):
        if dimension >= 0:
            version = self.told + (version - self.told + 8) % 16 - 8
        super().tell(version, ops, dimension)


class LeavesWithoutFin(WaitAvoiding):
    """A rank leaves when it has executed everything, whatever is still under way to it."""

    def agreed(self, records, size):
        super().agreed(records, size)
        if self.stage == protocols.LEAVING:
            self.fin_due = 0
            self.fin_seen = (1 << self.dimensions) - 1


class LateWithoutWaiting(WaitAvoiding):
    """A late call returns at once, with whatever result there is."""

    def call(self):
        super().call()
        if self.waiting:
            self.waiting = False
            self.vectors = protocols.HELD


class GroupMembersServeOnlyWhenClosing(WaitAvoiding):
    """Where nobody is passive, a rank in another operation lets its group wait for a call."""

    def run(self):
        if self.passive or self.waiting or self.operation == CLOSE:
            super().run()


class InterruptedMemberServesNobody(WaitAvoiding):
    """Where nobody is passive, a group waits for a member whose call was interrupted."""

    def run(self):
        if self.passive or self.waiting or self.operation != protocols.NONE or self.broken:
            super().run()


class SilentSynchronisation(Rank):
    """A synchronisation does not publish the common average."""

    def adopt(self, mean):
        self.rule.model = self.rule.returned = mean


class BlockingSynchronisation(Rank):
    """A rank that waits in a synchronous operation does nothing else."""

    def events(self):
        events = super().events()
        if self.application.stage == Stage.AGREEING:
            return [event for event in events if event[1] in ("agree", "step")]
        return events


class PublishesWhileRunning(Application):
    """A late call publishes at once, also while a version runs."""

    def call(self):
        super().call()
        if self.rank.protocol.waiting:
            self.vector = self.rank.publish()


class Impatient(Application):
    """After an interrupted call the next one is made before the first one's version is over."""

    def caught_up(self):
        return True


def long_periods(generator):
    """Many versions without a synchronisation, so that an activation can become very old."""
    world_size = generator.randint(4, 9)
    return Scenario(
        world_size,
        group_size=generator.randint(2, world_size),
        sync_period=100,
        programs=((*[CALL] * 30, CLOSE),) * world_size,
        sends=generator.choice((AT_ONCE, DELAYED)),
    )


def several_activators(generator):
    """Half of the ranks call, the others close at once: an activation must reach them."""
    world_size = generator.randint(5, 9)
    programs = [(*[CALL] * 5, CLOSE), (CLOSE,)] * 5
    return Scenario(
        world_size,
        group_size=generator.randint(2, world_size),
        sync_period=100,
        programs=tuple(generator.sample(programs, world_size)),
    )


def stopped_applications(generator):
    """Each rank averages over all of them after another call, and some applications stop."""
    world_size = generator.randint(3, 9)
    programs = []
    for _ in range(world_size):
        early = generator.randint(0, 6)
        programs.append((*[CALL] * early, AVERAGE, *[CALL] * (6 - early), CLOSE))
    return Scenario(
        world_size,
        group_size=generator.randint(2, world_size),
        sync_period=100,
        programs=tuple(programs),
        frozen=frozenset(generator.sample(range(world_size), 2)),
        frozen_from=generator.randint(0, 20 * world_size),
    )


@dataclass(frozen=True)
class Mutant:
    """A wrong variant, what catches it, and among how many seeds at the most."""

    variant: type
    invariants: set
    seeds: int
    scenarios: object = random_scenario

    def run(self, seed):
        bases = {
            "protocol_type": WaitAvoiding,
            "rank_type": Rank,
            "application_type": Application,
        }
        part = next(part for part, base in bases.items() if issubclass(self.variant, base))
        run_seed(seed, self.scenarios, **{part: self.variant})


MUTANTS = [
    Mutant(ForwardsOnlyTheFirst, {Invariant.ENDS}, 500, several_activators),
    Mutant(TimelyUntilExecuted, {Invariant.TIMELY}, 50),
    Mutant(SilentSynchronisation, {Invariant.EPOCH}, 50),
    Mutant(NoGate, {Invariant.EPOCH}, 50),
    Mutant(VersionFromTag, {Invariant.IN_ORDER}, 500, long_periods),
    Mutant(BlockingSynchronisation, {Invariant.WAIT_AVOIDING}, 100, stopped_applications),
    Mutant(LeavesWithoutFin, {Invariant.DRAINED}, 100),
    Mutant(LateWithoutWaiting, {Invariant.LATE}, 50),
    Mutant(PublishesWhileRunning, {Invariant.BETWEEN_VERSIONS}, 50),
    Mutant(GroupMembersServeOnlyWhenClosing, {Invariant.ENDS}, 100),
    Mutant(InterruptedMemberServesNobody, {Invariant.ENDS}, 500),
    Mutant(Impatient, {Invariant.LATE}, 100),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.variant.__name__)
def test_a_wrong_variant_is_caught_where_the_protocol_passes(mutant):
    for seed in range(mutant.seeds):
        run_seed(seed, mutant.scenarios)
        try:
            mutant.run(seed)
        except Violation as violation:
            if violation.invariant in mutant.invariants:
                print(f"{mutant.variant.__name__} is caught by seed {seed}: {violation}")
                return
    pytest.fail(f"{mutant.variant.__name__} passes {mutant.seeds} seeds")
