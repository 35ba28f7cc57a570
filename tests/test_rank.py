"""What a rank decides, compiled as in engines and from its source as in tests, by the same events.

Here its port is a recorder, which answers at random: both ranks have the same actions executed, in
the same order, and get the same answers.
"""

import functools
import random
from collections import Counter
from pathlib import Path

import pytest
from compiled import built, of_python
from protocol_messages import (
    all_ranks,
    contribution,
    late_rules,
    own_pace,
    protocols,
    rank_port,
    snapshots,
    version_steps,
)

SOURCE = Path(__file__).parent / "compiled_rank.pyx"
EVENTS = 120
OPERATIONS = (
    *(all_ranks.SYNC, all_ranks.SYNCHRONIZE, all_ranks.AVERAGE, all_ranks.LOAD, all_ranks.MEET),
    *(all_ranks.SAVE, all_ranks.CLOSE),
)
PURPOSES = (
    *(version_steps.PUBLISHING, version_steps.JOINING),
    *(version_steps.FETCHING, version_steps.REBASING, version_steps.LEASING),
)
# What a recorder is asked, and what it may answer.
ANSWERS = {
    **dict.fromkeys(("is_here", "knows_change", "is_exchanged", "is_quiet"), (True, True, False)),
    **dict.fromkeys(("all_finite", "is_change_finite"), (True, True, True, False)),
    **dict.fromkeys(("take_change", "end_pass"), (True, True, True, False)),
    **dict.fromkeys(("has_begun", "replaced", "needs_messages"), (True, False)),
    **dict.fromkeys(("leaves_to_others", "help"), (True, False)),
    **dict.fromkeys(("total_weight", "closed_weight"), (0.0, 1.0, 2.5)),
    **dict.fromkeys(("mean_count", "closed_count", "closed_average_count"), (0.5, 3.0, 4.25)),
    "closed_average": (-1, -1, 0),
}


class Recorder:
    """A rank's port, vectors and tree; it knows only the number that others have reached."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.actions = []
        self.number = 0

    def __getattr__(self, action):
        if action.startswith("__"):
            raise AttributeError(action)
        return functools.partial(self.execute, action)

    def execute(self, action, *details):
        answer = None
        if action == "open":
            (self.number,) = details
        elif action in ("reached", "close"):
            self.number += self.random.choice((0, 0, 1))
            answer = self.number
        elif action in ANSWERS:
            answer = self.random.choice(ANSWERS[action])
        self.actions.append((action, *details, answer))
        return answer


class SourceRank:
    """One rank of the protocols' sources, with the methods of a compiled one."""

    def __init__(self, port, dimensions, group_size, sync_period, passive, *options):
        late, seed, shares, own = options
        kind = own_pace.OwnPaceProtocol if own else protocols.WaitAvoidingProtocol
        self.versions = kind(dimensions, group_size, sync_period, passive)
        self.versions.attach(port)
        if seed is not None:
            self.versions.draw(0, 1 << dimensions, seed)
        self.publishing = snapshots.SnapshotProtocol(
            port, self.versions, late_rules.late_rule(late)
        )
        self.driven = version_steps.VersionsProtocol(self.versions, self.publishing)
        self.driven.attach(port)
        self.publishing.replace()
        self.publishing.count_once()
        self.publishing.lease.begin(1)
        self.driven.begin(shares)
        self.give, self.forget = self.publishing.give, self.publishing.forget
        self.activate, self.notice = self.versions.activate, self.versions.notice
        for event in ("call", "hold", "enter", "advance", "passed"):
            setattr(self, event, getattr(self.driven, event))

    def agreed(self, records, loading, differ):
        self.driven.agreed(records, len(records) // 2, loading, differ, False)

    def send(self, dimension):
        if self.versions.due_on() >> dimension & 1:
            self.versions.send_on(dimension)

    def interrupt(self, ended):
        self.driven.interrupt()
        self.driven.interrupted(ended)


def compiled_rank():
    """Return CompiledRank, built where that has not been done."""
    ports = (
        of_python(("all_ranks", "TreePort")),
        of_python(("contribution", "Vectors")),
        of_python(("rank_port", "StepPort"), ("rank_port", "RankPort")),
    )
    return built("compiled_rank", "\n".join([*ports, SOURCE.read_text()])).CompiledRank


class Life:
    """A rank that meets the events of a seed: those that a driver may report to it then.

    Which they are depends on the rank; one that decides differently soon meets others.
    """

    def __init__(self, make, seed, own=False):
        self.own = own
        self.random = random.Random(seed)
        self.port = Recorder(seed)
        self.dimensions = self.chosen(1, 2, 3)
        late = self.chosen("conserving", "paper", "sums")
        self.rank = make(
            *(self.port, self.dimensions, self.chosen(1, 2, 1 << self.dimensions)),
            *(self.chosen(3, 100), self.chosen(True, False), late),
            *(self.chosen(None, None, None if own else 7), self.chosen(True, False), own),
        )
        self.in_call = False
        for _ in range(EVENTS):
            self.happen()

    def chosen(self, *options):
        return self.random.choice(options)

    def happen(self):
        rank, driven = self.rank, self.rank.driven
        if driven.passing:
            rank.passed()
        elif self.in_call and driven.done:
            self.in_call = False
            rank.forget()
        else:
            event = self.chosen(
                "act", "activate", "activate", "agree", "agree", "send", "fail", "interrupt"
            )
            getattr(self, event)()
        rank.advance()

    def act(self):
        """The application calls, or enters an operation, unless it is in one or has closed."""
        rank, versions = self.rank, self.rank.versions
        behind = versions.next < versions.version and not rank.driven.opened
        if self.in_call or versions.stage != all_ranks.OUTSIDE or versions.broken or behind:
            return
        self.in_call = True
        rank.give(self.chosen(1.0, 1.0, 0.0, 2.0))
        kind = self.chosen("call", "call", "call", "hold", "hold", "enter")
        if kind == "call" and (versions.version + versions.base + 1) % 3 == 0 and not self.own:
            rank.enter(all_ranks.SYNC)
        elif kind == "enter":
            rank.enter(self.chosen(*OPERATIONS))
        elif kind == "hold":
            rank.hold(self.chosen(*PURPOSES))
        else:
            rank.call()

    def activate(self):
        versions = self.rank.versions
        version = versions.started + self.chosen(-1, 0, 1, 1, 2)
        self.rank.activate(max(version, 0), versions.ops, self.random.randrange(self.dimensions))

    def agree(self):
        """All have entered an operation, mostly the same one."""
        versions = self.rank.versions
        if versions.stage != all_ranks.AGREEING:
            return
        self.rank.driven.gathers = False
        own = versions.operation, versions.version
        records = [*own]
        for _ in range(1, 1 << self.dimensions):
            other = self.chosen(*OPERATIONS, all_ranks.JOIN), versions.version + self.chosen(0, 1)
            records += self.chosen(own, own, own, other)
        self.rank.agreed(records, self.chosen(0, 5), self.random.random() < 0.05)

    def send(self):
        self.rank.send(self.random.randrange(self.dimensions))

    def fail(self):
        if self.random.random() < 0.05:
            self.rank.notice(1, self.chosen(-1, 0))

    def interrupt(self):
        if self.in_call and self.random.random() < 0.3:
            self.rank.interrupt(self.chosen(True, True, False))
            self.rank.forget()
            self.in_call = False

    def end(self):
        """Return what the rank has become."""
        versions, driven, publishing = self.rank.versions, self.rank.driven, self.rank.publishing
        return {
            **{
                name: getattr(versions, name)
                for name in ("next", "version", "started", "calls", "ops")
            },
            **{name: getattr(driven, name) for name in ("timely", "synchronizations", "weight")},
            **{name: getattr(publishing, name) for name in ("state", "snapshot_weight", "work")},
        }


@pytest.mark.parametrize("own", (False, True))
@pytest.mark.parametrize("block", range(3))
def test_a_compiled_rank_has_the_same_actions_executed_as_its_source(block, own):
    make = compiled_rank()
    for seed in range(100 * block, 100 * (block + 1)):
        source, compiled = Life(SourceRank, seed, own), Life(make, seed, own)
        assert compiled.port.actions == source.port.actions, f"seed {seed}"
        assert compiled.end() == source.end(), f"seed {seed}"


def test_the_random_events_have_every_action_executed():
    actions = Counter(action for seed in range(300) for action, *_ in executed(seed))
    ports = *rank_port.RankPort.__mro__[:2], contribution.Vectors, all_ranks.TreePort
    asked = {name for port in ports for name in vars(port) if not name.startswith("_")}
    assert asked - set(actions) == set()
    assert min(actions.values()) > 5


def executed(seed):
    return Life(SourceRank, seed).port.actions


def test_a_rank_that_decides_differently_is_told_apart(monkeypatch):
    """Such as one that never publishes between two calls."""

    def next_step(self):
        step = ordinary(self)
        return version_steps.WAIT if step == version_steps.SHARE else step

    ordinary = version_steps.VersionsProtocol.next_step
    monkeypatch.setattr(version_steps.VersionsProtocol, "next_step", next_step)
    make = compiled_rank()
    assert any(Life(make, seed).port.actions != executed(seed) for seed in range(20))
