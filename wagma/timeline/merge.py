"""The ranks' events as slices, marks, counters and arrows of one timeline."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives.recording.recorder import OTHER_NAMES
from wagma.timeline.clocks import Clock, align
from wagma.timeline.rings import Ring, read_all

# Tracks of a rank: its threads, and by the number of each collective.
APPLICATION, ENGINE = 0, 1
VERSIONS, OPERATIONS, ACTIVATIONS, MESSAGES = 1000, 2000, 3000, 4000
MARK = 500  # nanoseconds for which an activation or a message is shown
SHORTEST_GAP = 1000  # nanoseconds between calls that are shown as the application's own work
OWN = "outside calls"
CALL = 100  # as in `collectives.engine.calls`: what a call requests, and from here on calls proper
PUBLISH = 101
GROUPS = ("ReadyGroupAllreduce", "GeneratedGroupAllreduce")  # whose versions are groups
# What the kinds of messages between peers are, as in `collectives.protocols`.
LEAVING = {0: "leave", 1: "pause"}
MESSAGE_KINDS = {
    "NeighborAverage": {2: "model", 3: "clock"},
    "QueuedNeighborAverage": {2: "update", 3: "token", 4: "acknowledgement"},
    "PushSum": {2: "share"},
    "PairwiseAverage": {2: "request", 3: "grant", 4: "refusal", 5: "half of the difference"},
    "ParameterServer": {2: "update", 3: "model", 4: "last update"},
}


class Slice(NamedTuple):
    """Something that a rank does for a while.

    Attributes:
        begin, length: in nanoseconds since the timeline's zero.
        track: where it is shown; see the constants of this module.
        kind: the kind of event, such as "wait", or "own" for what is between calls.
        name: what is shown.
        about: further facts, by name.
    """

    begin: int
    length: int
    track: int
    kind: str
    name: str
    about: dict[str, Any] = {}

    @property
    def end(self) -> int:
        """When it ends."""
        return self.begin + self.length


class Count(NamedTuple):
    """A counter's new value, at a time in nanoseconds since zero."""

    time: int
    name: str
    value: int


class Message(NamedTuple):
    """A message that a rank has sent to a peer, or received from one.

    Attributes:
        time: in nanoseconds since zero.
        collective: its number on this rank.
        peer: the other rank of the job.
        number, kind: the message's.
        vector: whether it has a vector.
        awaited: whether this rank has received it, and waited for that peer.
        sent: whether this rank has sent it.
    """

    time: int
    collective: int
    peer: int
    number: int
    kind: int
    vector: bool
    awaited: bool
    sent: bool


class Arrow(NamedTuple):
    """From a slice of one rank to one of another, each by its time and track, and what it is."""

    time: int
    rank: int
    track: int
    to_time: int
    to_rank: int
    to_track: int
    name: str = "activation"


class Executed(NamedTuple):
    """A version that a rank has executed; `begin` is None if others have done so for it."""

    begin: int | None
    end: int
    members: tuple[int, ...]


@dataclass
class Rank:
    """One rank's part of a timeline.

    Attributes:
        ring: what it has recorded.
        clock: how its times were put on the common scale.
        slices: in the order of their beginnings on each track.
        counts: in the order of their times.
        tracks: the names of its tracks.
    """

    ring: Ring
    clock: Clock
    slices: list[Slice] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    tracks: dict[int, str] = field(default_factory=dict)


@dataclass
class Timeline:
    """A job's timeline.

    Attributes:
        ranks: by rank.
        arrows: of activations, and of vectors between peers.
        former: files of a former job in the same directory, which are left out.
    """

    ranks: dict[int, Rank]
    arrows: list[Arrow]
    former: list[Ring]


def load(directory: Path) -> Timeline:
    """Read a run's files, and put them together.

    Raises:
        UsageError: there are none, or one is damaged.
    """
    rings, former = read_all(directory)
    return merge(rings, former)


def merge(rings: list[Ring], former: Iterable[Ring] = ()) -> Timeline:
    """Put the ranks' events together, on one clock; zero is the first call or span."""
    clocks = align(rings)
    parts = [Part(ring, clocks[ring.rank]) for ring in rings]
    zero = min((part.zero() for part in parts if part.clock.aligned and len(part.times)), default=0)
    for part in parts:
        part.count_from(zero if part.clock.aligned or not len(part.times) else part.zero())
    job = Job(parts)
    ranks = {part.ring.rank: part.rank(job) for part in parts}
    return Timeline(ranks, [*job.arrows(), *job.vectors()], list(former))


class Part:
    """A rank's events by their kinds, with the common clock's times.

    Attributes:
        events: of this recording.
        times: when they began, in nanoseconds.
    """

    def __init__(self, ring: Ring, clock: Clock) -> None:
        # What an earlier recording had not completed is not of this one.
        ends = ring.events["time"] + ring.events["length"]
        self.ring, self.clock = ring, clock
        self.events = ring.events[ends >= ring.about["began"][1]]
        self.times = clock.to_reference(self.events["time"])
        self.kinds = {name: code for code, name in enumerate(ring.about["kinds"])}
        self.collectives = {int(number): each for number, each in ring.about["collectives"].items()}

    def zero(self) -> int:
        """Return when the rank's first call or span began."""
        kind = self.events["kind"]
        first = self.times[(kind == self.kinds["span"]) | (kind == self.kinds["call"])]
        return int((first if len(first) else self.times).min())

    def count_from(self, zero: int) -> None:
        """Count times from there on."""
        self.times = self.times - zero

    def select(self, *kinds: str) -> Iterator[tuple[Any, ...]]:
        """Yield events of some kinds, in the order in which they were recorded.

        Each is a tuple: index, kind's name, time, length, numbers, collective, thread, count.
        """
        # A file of an earlier version lacks the newest kinds.
        codes = {self.kinds[kind]: kind for kind in kinds if kind in self.kinds}
        (places,) = np.nonzero(np.isin(self.events["kind"], list(codes)))
        chosen = self.events[places]
        columns = (chosen[name].tolist() for name in ("kind", "length", "numbers"))
        others = (chosen[name].tolist() for name in ("collective", "thread", "count"))
        for place, time, kind, length, numbers, *rest in zip(
            places.tolist(), self.times[places].tolist(), *columns, *others
        ):
            yield place, codes[kind], time, length, numbers, *rest

    def identity(self, collective: int) -> int | None:
        """Return what identifies a collective on all ranks; None if it is not described."""
        found = self.collectives.get(collective)
        return None if found is None else found["identity"]

    def in_job(self, collective: int, rank: int) -> int:
        """Return which rank of the job a collective's rank is."""
        found = self.collectives.get(collective)
        return found["ranks"][rank] if found else rank

    @cached_property
    def versions(self) -> list[tuple[int, int, int, int, Executed]]:
        """The versions: tuples of collective, version, staleness, ahead, and what was executed."""
        found = []
        groups: dict[int, list[int]] = {}  # by collective, the last version's: more may follow
        for _, kind, time, length, numbers, collective, _, count in self.select(
            "version", "executed", "members"
        ):
            if kind == "members":
                groups.get(collective, []).extend(shorts(numbers, count))
                continue
            groups[collective] = shorts(numbers[3:], count)
            begin = time if kind == "version" else None
            found.append((collective, *numbers[:3], begin, time + length, groups[collective]))
        group = lru_cache(None)(self._group)
        return [
            (collective, version, staleness, ahead, Executed(begin, end, group(collective, *ranks)))
            for collective, version, staleness, ahead, begin, end, ranks in found
        ]

    @cached_property
    def messages(self) -> list[Message]:
        """The messages to and from peers, in the order of their times."""
        found = []
        for _, kind, time, _, numbers, collective, *_ in self.select("sent", "received"):
            peer, number, bits = numbers[:3]
            facts = bits // 4, bool(bits & 1), bool(bits & 2), kind == "sent"
            found.append(Message(time, collective, self.in_job(collective, peer), number, *facts))
        return sorted(found)

    def _group(self, collective: int, *ranks: int) -> tuple[int, ...]:
        """Return the ranks of the job that are these of a collective."""
        return tuple(sorted(self.in_job(collective, rank) for rank in ranks))

    def rank(self, job: Job) -> Rank:
        """Return what the timeline shows of this rank."""
        made = Rank(self.ring, self.clock)
        by_track: dict[int, list[Slice]] = defaultdict(list)
        for each in self._of_threads(job):
            by_track[each.track].append(each)
        for thread, slices in by_track.items():
            by_track[thread] = nested(slices)
        by_track[APPLICATION] = with_gaps(by_track.get(APPLICATION, []))
        for each in itertools.chain(
            self._versions(job), self._operations(), self._activations(job), self._messages()
        ):
            by_track[each.track].append(each)
        for track, slices in by_track.items():
            if track >= VERSIONS:
                slices = one_after_the_other(slices)
            if slices:
                made.slices += slices
                made.tracks[track] = self._name_of(track)
        made.counts = list(self._counts())
        return made

    def _name_of(self, track: int) -> str:
        if track < VERSIONS:
            return {APPLICATION: "application", ENGINE: "engine"}.get(track, f"thread {track}")
        what = {
            VERSIONS: "versions",
            OPERATIONS: "operations",
            ACTIVATIONS: "activations",
            MESSAGES: "messages",
        }
        kind, number = divmod(track, VERSIONS)
        described = self.collectives.get(number, {"kind": "a collective"})
        return f"{what[kind * VERSIONS]} of {described['kind']} {number}"

    def _of_threads(self, job: Job) -> Iterator[Slice]:
        """Yield the slices of threads: what the application does, and parts of calls."""
        names, operations = self.ring.about["names"], self.ring.about["operations"]
        waits = {}
        for _, kind, time, length, numbers, collective, thread, _ in self.select(
            "span", "call", "wait", "copy", "exchange", "waiting"
        ):
            if kind == "waiting":
                # Its wait follows, unless the process has ended in it.
                waits[collective, thread] = time, length
                continue
            name = kind
            about: dict[str, Any] = {}
            if kind == "span":
                name = names[numbers[0]] if numbers[0] < len(names) else OTHER_NAMES
                kind = "lap" if numbers[1] else kind
            elif kind == "call":
                name, about = call_in_words(numbers[0], numbers[1], operations)
            elif kind == "wait":
                waits.pop((collective, thread), None)
                name, about = "waiting", {"processing others' data (µs)": numbers[1] / 1000}
                late = job.late(self, collective, time, time + length)
                if late:
                    about["for rank: how late (µs)"] = late
            yield Slice(time, length, thread, kind, NAMES.get(kind, name), about)
        for (_, thread), (time, length) in waits.items():
            yield Slice(time, length, thread, "wait", "waiting, until the process ended", {})

    def _versions(self, job: Job) -> Iterator[Slice]:
        """Yield the versions, also those that others have executed for this rank."""
        for collective, version, staleness, ahead, what in self.versions:
            group = self.collectives.get(collective, {}).get("kind") in GROUPS
            name = f"{'group' if group else 'version'} {version}"
            about: dict[str, Any] = {
                "staleness": staleness,
                "versions ahead of the calls": ahead,
            }
            begin, end, members = what
            if begin is None:
                by = job.executor(self, collective, version)
                begin = what.end
                if by is not None:
                    rank, (began, end, members) = by
                    about["executed by rank"] = rank
                    begin = end if began is None else began
                about["noticed (ns)"] = what.end
                name += ", by others"
            if staleness:
                name += ", passive"
            about["members"] = list(members)
            if job.started(self, collective, version):
                about["started by"] = "this rank"
            yield Slice(begin, end - begin, VERSIONS + collective, "version", name, about)

    def _operations(self) -> Iterator[Slice]:
        words = self.ring.about["operations"]
        for _, kind, time, length, numbers, collective, *_ in self.select("operation"):
            name = words.get(str(numbers[0]), "an operation")
            about = {"operations before it": numbers[1]}
            yield Slice(time, length, OPERATIONS + collective, kind, name, about)

    def _activations(self, job: Job) -> Iterator[Slice]:
        for _, kind, time, _, numbers, collective, *_ in self.select("learned"):
            about: dict[str, Any] = {"from rank": self.in_job(collective, numbers[1])}
            told = job.told.get((self.identity(collective), numbers[0], self.ring.rank))
            verb = "learns of"
            if told:
                about["forwards it to ranks"] = told
                verb = "forwards"
            track = ACTIVATIONS + collective
            yield Slice(time, MARK, track, kind, f"{verb} version {numbers[0]}", about)

    def _messages(self) -> Iterator[Slice]:
        """Yield the messages to and from peers."""
        for each in self.messages:
            collective = self.collectives.get(each.collective, {}).get("kind")
            names = LEAVING | MESSAGE_KINDS.get(collective, {})
            what = f"{names.get(each.kind, 'message')} {each.number}"
            how = f"sends {what} to" if each.sent else f"receives {what} from"
            about: dict[str, Any] = {"has a vector": each.vector}
            if not each.sent:
                about["was waited for"] = each.awaited
            kind = "sent" if each.sent else "received"
            name = f"{how} rank {each.peer}"
            yield Slice(each.time, MARK, MESSAGES + each.collective, kind, name, about)

    def _counts(self) -> Iterator[Count]:
        last: dict[str, int] = {}
        counts = []
        for collective, _, staleness, ahead, what in self.versions:
            counts.append(Count(what.end, f"staleness {collective}", staleness))
            counts.append(Count(what.end, f"versions ahead {collective}", ahead))
        for _, _, time, _, numbers, collective, *_ in self.select("bytes"):
            counts.append(Count(time, f"bytes sent {collective}", numbers[0]))
        for each in sorted(counts):
            if last.get(each.name) != each.value:
                last[each.name] = each.value
                yield each


NAMES = {"copy": "copying", "exchange": "exchanging"}
CUT = ("exchange", "lap")  # kinds of slices that are cut to nest with others


class Job:
    """What connects the ranks: who executed which version when, and who activated whom."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = {part.ring.rank: part for part in parts}
        # By collective and version, by rank; by collective and rank, in order; by collective and
        # number of an operation, by rank: when it entered that.
        self.executed: dict[tuple[Any, ...], dict[int, Executed]] = defaultdict(dict)
        self.order: dict[tuple[Any, ...], tuple[list[int], list[tuple[Any, ...]]]] = {}
        self.entered: dict[tuple[Any, ...], dict[int, int]] = defaultdict(dict)
        # By collective, version and rank: when it learned of it, and from whom; whom it has told;
        # when it called it, and on which track.
        self.learned: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.told: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        self.called: dict[tuple[Any, ...], tuple[int, int]] = {}
        # By collective and rank: when the vectors came that it waited for, and from whom.
        self.awaited: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
        for part in parts:
            self._add(part)

    def _add(self, part: Part) -> None:
        rank = part.ring.rank
        spans: dict[int | None, list[tuple[Any, ...]]] = defaultdict(list)
        for collective, version, _, _, what in part.versions:
            identity = part.identity(collective)
            self.executed[identity, version][rank] = what
            if what.begin is not None:
                spans[identity].append((what.begin, what.end, ("version", version), what.members))
        for _, _, time, length, numbers, collective, *_ in part.select("operation"):
            identity = part.identity(collective)
            self.entered[identity, numbers[1]][rank] = time
            members = part.collectives.get(collective, {"ranks": ()})["ranks"]
            spans[identity].append((time, time + length, ("operation", numbers[1]), members))
        for identity, found in spans.items():
            found.sort()
            self.order[identity, rank] = [each[0] for each in found], found
        for each in part.messages:
            if each.awaited:
                place = part.identity(each.collective), rank
                self.awaited[place].append((each.time, each.peer))
        for _, _, time, _, numbers, collective, *_ in part.select("learned"):
            source = part.in_job(collective, numbers[1])
            self.learned[part.identity(collective), numbers[0], rank] = time, source
            self.told[part.identity(collective), numbers[0], source].append(rank)
        for _, _, time, _, numbers, collective, thread, _ in part.select("call"):
            if numbers[0] >= CALL:
                key = part.identity(collective), numbers[1], rank
                self.called.setdefault(key, (time, thread))

    def started(self, part: Part, collective: int, version: int) -> bool:
        """Return whether this rank has started a version, before anybody had told it of that."""
        key = part.identity(collective), version, part.ring.rank
        return key in self.called and key not in self.learned

    def executor(self, part: Part, collective: int, version: int) -> tuple[int, Executed] | None:
        """Return which rank executed a version for this one first, and when; None: not known."""
        found = [
            (rank, what)
            for rank, what in self.executed[part.identity(collective), version].items()
            if what.begin is not None
            and part.ring.rank in what.members
            and self.parts[rank].clock.aligned
            and part.clock.aligned
        ]
        return min(found, key=lambda each: each[1].end, default=None)

    def late(self, part: Part, collective: int, begin: int, end: int) -> dict[str, float]:
        """Return the ranks that a wait was for, and how many µs after its begin they came.

        They are the members of the version or operation in which it ended, or the peers whose
        messages came meanwhile.
        """
        identity, rank = part.identity(collective), part.ring.rank
        peers = self.awaited.get((identity, rank))
        if peers:
            first, last = bisect_right(peers, (begin,)), bisect_right(peers, (end + 1,))
            came_last = {str(peer): (came - begin) / 1000 for came, peer in peers[first:last]}
            if came_last:
                return dict(sorted(came_last.items(), key=lambda each: -each[1]))
        if (identity, rank) not in self.order or not part.clock.aligned:
            return {}
        begins, found = self.order[identity, rank]
        last = bisect_right(begins, end) - 1
        if last < 0:
            return {}
        _, ended, (what, number), members = found[last]
        if ended < begin:
            return {}
        late = {}
        for member in members:
            if member == rank or member not in self.parts:
                continue
            if what == "operation":
                came = self.entered[identity, number].get(member)
            else:
                executed = self.executed[identity, number].get(member)
                came = executed.begin if executed else None
            if came is not None and self.parts[member].clock.aligned and begin < came <= end:
                late[str(member)] = (came - begin) / 1000
        return dict(sorted(late.items(), key=lambda each: -each[1]))

    def arrows(self) -> Iterator[Arrow]:
        """Yield how ranks learned of versions, as far as their clocks are aligned.

        From the call that started a version, or from where the sender had learned of it, to where
        the receiver does; and from there to the version that it executes. Together they lead from
        the rank that started a version to those that executed it.
        """
        for (identity, version, rank), (time, source) in self.learned.items():
            track = ACTIVATIONS + self._number_of(rank, identity)
            if self.is_aligned(rank) and self.is_aligned(source):
                origin = self._origin(identity, version, source)
                if origin is not None:
                    yield Arrow(min(origin[0], time), source, origin[1], time, rank, track)
            what = self.executed[identity, version].get(rank)
            if what and what.begin is not None and what.begin >= time:
                to_track = track - ACTIVATIONS + VERSIONS
                yield Arrow(time, rank, track, what.begin, rank, to_track)

    def vectors(self) -> Iterator[Arrow]:
        """Yield how vectors came from peers, as far as their clocks are aligned.

        Messages from one rank to another with the same number and kind come in their order.
        """
        sent: dict[tuple[Any, ...], deque[tuple[int, int]]] = defaultdict(deque)
        for rank, part in self.parts.items():
            for each in part.messages:
                if each.sent and each.vector and self.is_aligned(rank):
                    key = part.identity(each.collective), rank, each.peer, each.number, each.kind
                    sent[key].append((each.time, MESSAGES + each.collective))
        for rank, part in self.parts.items():
            for each in part.messages:
                key = part.identity(each.collective), each.peer, rank, each.number, each.kind
                if not each.sent and self.is_aligned(rank) and sent.get(key):
                    time, track = sent[key].popleft()
                    to = MESSAGES + each.collective
                    yield Arrow(
                        min(time, each.time), each.peer, track, each.time, rank, to, "vector"
                    )

    def _origin(self, identity: int | None, version: int, rank: int) -> tuple[int, int] | None:
        """Return when, and on which track, a rank began to tell others of a version."""
        learned = self.learned.get((identity, version, rank))
        if learned is not None:
            return learned[0], ACTIVATIONS + self._number_of(rank, identity)
        return self.called.get((identity, version, rank))

    def is_aligned(self, rank: int) -> bool:
        """Return whether a rank's times can be compared with others'."""
        return rank in self.parts and self.parts[rank].clock.aligned

    def _number_of(self, rank: int, identity: int | None) -> int:
        for number, each in self.parts[rank].collectives.items():
            if each["identity"] == identity:
                return number
        return 0


def shorts(numbers: list[int], count: int) -> list[int]:
    """Return so many 16-bit numbers of 64-bit ones."""
    return [numbers[place // 4] >> 16 * (place % 4) & 0xFFFF for place in range(count)]


def call_in_words(
    what: int, version: int, operations: dict[str, str]
) -> tuple[str, dict[str, Any]]:
    """Return a call's name, and facts about it."""
    if what == 0:
        return f"wait for call {version}", {}
    if what == PUBLISH:
        return "publish()", {}
    if what >= CALL:
        return f"call {version}", {}
    return operations.get(str(what), "an operation"), {"version": version}


def nested(slices: list[Slice]) -> list[Slice]:
    """Return one thread's slices so that each is within another or apart from it.

    Data of others are processed before and in a wait, and laps follow one another: such a slice is
    cut where another begins or ends.
    """
    whole = [each for each in slices if each.kind not in CUT]
    some = [each for each in slices if each.kind in CUT]
    spans, others = spans_of(some), spans_of(whole)
    begins = others[np.lexsort((others[:, 1], others[:, 0]))]
    ends = others[np.lexsort((others[:, 0], others[:, 1]))][:, ::-1]
    # Of the sorted begins and ends of the others, those that are within each slice.
    bounds = [
        (
            of,
            np.searchsorted(of[:, 0], spans[:, 0], "right"),
            np.searchsorted(of[:, 0], spans[:, 1]),
        )
        for of in (begins, ends)
    ]
    for place in np.flatnonzero(np.any([first < last for _, first, last in bounds], axis=0)):
        each = some[place]
        (_, first, last), (_, after, before) = bounds
        inner = [at for at, end in begins[first[place] : last[place]].tolist() if end > each.end]
        inner += [at for at, b in ends[after[place] : before[place]].tolist() if b < each.begin]
        if inner:
            at = [each.begin, *sorted(inner), each.end]
            some[place], *more = (
                each._replace(begin=b, length=e - b) for b, e in itertools.pairwise(at)
            )
            some += more
    cut = sorted([*whole, *some], key=itemgetter(1), reverse=True)
    cut.sort(key=itemgetter(0))  # the longer one of two that begin together is first
    result: list[Slice] = []
    open_until: list[int] = []
    for each in cut:
        begin, end = each[0], each[0] + each[1]
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        if open_until and end > open_until[-1]:  # its times were rounded
            end = open_until[-1]
            each = each._replace(length=end - begin)
        open_until.append(end)
        result.append(each)
    return result


def spans_of(slices: list[Slice]) -> np.ndarray:
    """Return the begins and ends of slices: int64 array of shape (slices, 2)."""
    begins = np.fromiter(map(itemgetter(0), slices), np.int64, len(slices))
    lengths = np.fromiter(map(itemgetter(1), slices), np.int64, len(slices))
    return np.column_stack([begins, begins + lengths])


def with_gaps(slices: list[Slice]) -> list[Slice]:
    """Return the application's slices with those in which it does what it does not tell."""
    result = []
    end = None
    for each in slices:
        begin, length, track, *_ = each
        if end is not None and begin - end >= SHORTEST_GAP:
            result.append(Slice(end, begin - end, track, "own", OWN))
        if end is None or begin + length > end:
            end = begin + length
        result.append(each)
    return result


def one_after_the_other(slices: list[Slice]) -> list[Slice]:
    """Return a track's slices in order, each ending where the next begins, at the latest."""
    ordered = sorted(slices)
    for place, (each, after) in enumerate(itertools.pairwise(ordered)):
        if each.end > after.begin:
            ordered[place] = each._replace(length=max(0, after.begin - each.begin))
    return ordered
