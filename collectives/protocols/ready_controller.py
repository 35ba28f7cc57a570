"""Partial Reduce's controller: which ranks average next, and the weight of each model.

Its parts are the paper's (Figure 6), except the broadcaster, which is in the ranks' protocol:

- the signal queue: ready ranks, oldest first;
- the group history: the members of the last T groups;
- the group filter: it takes the first P' of the queue, but if the graph of ranks that have averaged
  together would stay disconnected, it puts a rank of another part into the group
  (`PartialReduceController.choose`);
- the weight generator: all members have equal weights, or weights by the age of their models
  (`weigh`, `weigh_each`).

Source: Miao et al., Heterogeneity-Aware Distributed Machine Learning Training via Partial Reduce,
SIGMOD 2021, sections 3.3 and 4. How long the filter waits for a rank of another part, and that late
ranks count as absent, go beyond the paper.
"""

import array
import math

import cython

from collectives.protocols.formed_groups import Group
from collectives.protocols.paces import Paces

if not cython.compiled:  # else the .pxd declares them
    from collectives.protocols.paces import NEVER, UNKNOWN

# The most ranks for which the controller counts their common groups: a matrix of 32 MiB.
MOST_RECORDED = 2048


def shortest_history(size, group_size):
    """Return how many groups it takes to connect all ranks: the least T."""
    return -(-(size - 1) // max(group_size - 1, 1))


def default_history(size, group_size):
    """Return how many random groups almost always connect all ranks: ⌈(N/P')(ln N + 3)⌉."""
    enough = math.ceil(size / group_size * (math.log(size) + 3))
    return max(1, shortest_history(size, group_size), enough)


def weigh(iterations, count, alpha, nearest, weights):
    """Fill in the weights of models by their iterations, and return that of the initial model.

    With k = newest iteration − own iteration + 1, a model's weight is (1 − α) α^(k−1) divided by 1
    − α^(largest k), shared by the models of the same k. The weight of a k in between that no model
    has goes to the `nearest` k that a model has, the newer of two; or else to the initial model.
    """
    i: cython.int
    j: cython.int
    newest: cython.longlong = iterations[0]
    oldest: cython.longlong = iterations[0]
    for i in range(count):
        newest = max(newest, iterations[i])
        oldest = min(oldest, iterations[i])
    total: cython.double = 1 - alpha ** (newest - oldest + 1)
    initial: cython.double = 0
    for i in range(count):
        # The lag of this model, and the nearest lags of others before and after it.
        behind: cython.longlong = newest - iterations[i]
        before: cython.longlong = -1
        after: cython.longlong = -1
        alike: cython.int = 0
        for j in range(count):
            other: cython.longlong = newest - iterations[j]
            if other == behind:
                alike += 1
            elif other < behind:
                before = max(before, other)
            elif after < 0 or other < after:
                after = other
        first: cython.longlong = behind
        last: cython.longlong = behind + 1
        if nearest:
            first = (before + behind) // 2 + 1 if before >= 0 else 0
            last = (behind + after) // 2 + 1 if after >= 0 else last
        elif after >= 0:
            initial += (alpha**last - alpha**after) / total / alike
        weights[i] = (alpha**first - alpha**last) / total / alike
    return initial


def weigh_each(iterations, count, alpha, weights):
    """Fill in the weights of models by their iterations, each model for itself.

    They are proportional to α^(k−1), with the k of `weigh`, even if models have the same k.
    """
    i: cython.int
    newest: cython.longlong = iterations[0]
    for i in range(count):
        newest = max(newest, iterations[i])
    total: cython.double = 0
    for i in range(count):
        weights[i] = alpha ** (newest - iterations[i])
        total += weights[i]
    for i in range(count):
        weights[i] /= total


def weights_of(iterations, alpha, nearest, each, weights):
    """Call `weigh` or `weigh_each` from Python; iterations and weights have the same length."""
    if each:
        weigh_each(iterations, len(weights), alpha, weights)
        return 0
    return weigh(iterations, len(weights), alpha, nearest, weights)


class PartialReduceController:
    """Decides which ranks average next, from ready signals and notices of pauses and leaving.

    It knows how long each rank usually takes from a group to its next signal. A rank that takes
    much longer (`Paces.patience`) is late: if a group lacks members, it counts as absent until its
    next signal. A rank that has not signalled yet is compared with the slowest of the others.

    Args:
        size: N.
        group_size: P', at least 2; if fewer ranks are present, these average.
        history: T, at least `shortest_history`.
        dynamic: whether weights depend on the models' ages; else all are equal.
        alpha: α of dynamic weights, from 0 to less than 1.
        nearest: see `weigh`. each: whether dynamic weights are those of `weigh_each` instead.
        absent: a rank that is never ready; None: there is none.

    Attributes:
        formed: how many groups of several ranks were formed; alone: of one rank.
        bridges: groups in which the filter replaced a rank.
        holds: how often the filter held a group back; held: whether it holds one now; in_vain: how
            often no rank of another part came meanwhile.
        released: groups that were smaller than possible when a rank had waited too long.
        absences: how often ranks were late.
        now: the time, in nanoseconds, to be set before other events.
        due: the time from which `form` may form a group without another event.
        group: the group formed last. newest: its newest iteration. initial: the initial model's
            share in it.
    """

    def __init__(self, size, group_size, history, dynamic, alpha, nearest, absent=None, each=False):
        self.size = size
        self.group_size = min(group_size, size)
        self.history = history
        self.dynamic = dynamic
        self.alpha = alpha
        self.nearest = nearest
        self.each = each
        # The signal queue, and the iterations of its ranks.
        self.queue = array.array("i", [0]) * size
        self.waiting = 0
        self.iterations = array.array("q", [0]) * size
        self.ready = array.array("i", [0]) * size
        # The last pause of each rank, and the last that is over; which ranks have left. All pause
        # before any rank's pause of the same number is over.
        self.pauses = array.array("q", [0]) * size
        self.over = 0
        self.left = array.array("i", (rank == absent for rank in range(size)))
        # Which ranks are late. When each was last in a group, or began, and its usual time from
        # then to its signal.
        self.late = array.array("i", [0]) * size
        self.since = array.array("q", [0]) * size
        self.paces = Paces(size)
        self.now = 0
        self.due = NEVER
        self.absences = 0
        # The newest iteration of ranks that have paused.
        self.paused_at = 0
        # The group history: a ring of T groups.
        self.window = array.array("i", [0]) * (history * self.group_size)
        self.sizes = array.array("i", [0]) * history
        self.formed = 0
        self.alone = 0
        # Its graph: a forest with a tree for each component, and which ranks are in a group.
        self.parents = array.array("i", [0]) * size
        self.linked = array.array("i", [0]) * size
        self.home = -1
        # The number of formed groups up to which it certainly has only one component.
        self.connected_until = -1
        self.frozen = False
        # Whether ranks that are late by now count as that, and the end of a hold has come. Else
        # messages that have arrived may be unread: `due` is then now, not earlier.
        self.judges = True
        # The time until which a group is held; the number of groups from which one may be again.
        self.held_until = 0
        self.holds_from = 0
        # The ranks chosen, their iterations and weights.
        self.chosen = array.array("i", [0]) * size
        self.member_iterations = array.array("q", [0]) * size
        self.shares = array.array("d", [0]) * size
        self.dropped = 0
        self.added = 0
        self.group = Group(room=size)
        self.newest = 0
        self.initial = 0
        self.number = 0
        self.bridges = 0
        self.released = 0
        self.holds = 0
        self.in_vain = 0
        self.held = False
        # Sums of 1/|S| over the groups S that two ranks were in, and how many each was in.
        recorded: cython.int = size if size <= MOST_RECORDED and not dynamic else 0
        self.met = array.array("d", [0]) * (recorded * recorded)
        self.taken = array.array("q", [0]) * recorded
        self.recording = 0

    # The signal queue

    def signal(self, rank, iteration, pauses, fresh):
        """Handle a ready signal; `fresh`: the rank has the model that all got in its last pause."""
        if pauses > self.over:
            self.over = pauses
            self.connected_until = -1
            self.restart_times()
        else:
            self.paces.add(rank, self.now - self.since[rank])
        if self.late[rank]:
            self.late[rank] = False
            self.connected_until = -1
        self.iterations[rank] = self.paused_at + 1 if fresh else iteration
        self.ready[rank] = True
        self.queue[self.waiting] = rank
        self.waiting += 1

    def restart_times(self):
        """Measure all ranks' times from now on: they begin, or all have paused."""
        rank: cython.int
        for rank in range(self.size):
            self.since[rank] = self.now

    def withdraw(self, rank, iteration, pauses, leaves):
        """Handle a pause or leaving; if the rank was ready, make it a group of one: return True."""
        self.pauses[rank] = pauses
        self.left[rank] = self.left[rank] or leaves
        self.paused_at = max(self.paused_at, iteration)
        self.connected_until = -1
        if not self.ready[rank]:
            return False
        self.chosen[0] = rank
        self.close_group(1)
        return True

    def is_there(self, rank):
        """Return whether groups may wait for a rank."""
        return not (self.left[rank] or self.late[rank]) and self.pauses[rank] <= self.over

    def form(self):
        """Form the next group; return False if too few ranks are ready, or the filter holds it."""
        count: cython.int = self.count_there()
        self.due = NEVER
        if self.waiting > 0 and self.waiting < count and self.drop_late(False):
            count = self.count_there()
        if self.waiting == 0 or self.waiting < count:
            self.held = False
            return False
        if not self.choose(count):
            self.holds += not self.held
            self.held = True
            self.due = max(self.held_until, self.now)
            return False
        self.held = False
        self.choose_first(count)
        if self.added != self.dropped:
            self.bridges += 1
            self.chosen[self.dropped] = self.queue[self.added]
        self.close_group(count)
        return True

    def count_there(self):
        """Return how many ranks the next group is to have."""
        rank: cython.int
        count: cython.int = 0
        for rank in range(self.size):
            count += self.is_there(rank)
        return min(count, self.group_size)

    def drop_late(self, all_others):
        """Note which ranks are late, or all that are not ready (`all_others`); return if any is.

        Set `due` to the time at which the next rank will be late.
        """
        rank: cython.int
        any_late: cython.bint = False
        at: cython.longlong
        slowest: cython.longlong = UNKNOWN
        for rank in range(self.size):
            slowest = max(slowest, self.paces.usual(rank))
        for rank in range(self.size):
            if self.is_there(rank) and not self.ready[rank]:
                at = self.since[rank] + self.paces.patience(rank, slowest)
                if all_others or (self.judges and at <= self.now):
                    self.late[rank] = True
                    self.absences += 1
                    self.connected_until = -1
                    any_late = True
                else:
                    self.due = min(self.due, max(at, self.now))
        return any_late

    def choose_first(self, count):
        """Choose the first ranks of the queue."""
        i: cython.int
        for i in range(count):
            self.chosen[i] = self.queue[i]

    def release(self, rank):
        """Form a group of the ready ranks, however few; return False if `rank` is not ready.

        The others count as absent until their next signals.
        """
        if not self.ready[rank]:
            return False
        self.drop_late(True)
        count: cython.int = min(self.waiting, self.group_size)
        self.choose_first(count)
        self.close_group(count)
        self.released += 1
        self.held = False
        return True

    # The group filter

    def choose(self, count):
        """Set which of the first `count` ranks in the queue is `dropped`, and which is `added`.

        A group of the first ranks must not leave the graph of the last T groups disconnected. If it
        would, a ready rank of another component is added. Return False if none is ready, but one is
        worth waiting for.
        """
        i: cython.int
        component: cython.int
        members: cython.int = 0
        self.dropped = self.added = count - 1
        self.home = UNKNOWN
        if self.formed < self.history:
            return True
        if self.formed > self.connected_until:
            self.frozen = self.is_frozen()
        for i in range(count):
            component = self.component_of(self.queue[i])
            if component >= 0:
                if not self.frozen or (members > 0 and component != self.home):
                    return True
                self.home = component
                members += 1
        for i in range(count, self.waiting):
            component = self.component_of(self.queue[i])
            if component >= 0 and component != self.home:
                self.added = i
                # The only rank of its component stays, to average with the added one.
                if members == 1 and self.component_of(self.queue[self.dropped]) == self.home:
                    self.dropped -= 1
                return True
        return not self.is_worth_waiting(count)

    def is_worth_waiting(self, count):
        """Return whether to hold the group for a rank of another component.

        Only if one is expected within half of the members' shortest usual time. A group is held for
        that usual time at most, and then none of the next T groups.
        """
        i: cython.int
        rank: cython.int
        component: cython.int
        own: cython.longlong = NEVER
        first: cython.longlong = NEVER
        if self.held:
            if self.now < self.held_until or not self.judges:
                return True
            self.in_vain += 1
            return False
        if self.formed < self.holds_from:
            return False
        for i in range(count):
            own = min(own, self.paces.usual(self.queue[i]))
        for rank in range(self.size):
            component = self.component_of(rank)
            if component >= 0 and component != self.home and not self.ready[rank]:
                first = min(first, self.since[rank] + self.paces.usual(rank))
        if first == NEVER or first - self.now > own // 2:
            return False
        self.held_until = self.now + max(own, 1)
        self.holds_from = self.formed + self.history
        return True

    def is_frozen(self):
        """Return whether several components of the graph each contain a group of the last T.

        Absent ranks are not in the graph, and a group with one remaining rank does not count.
        """
        rank: cython.int
        age: cython.int
        i: cython.int
        # The oldest group that connects components: later groups can only connect more.
        oldest: cython.longlong = self.formed
        for rank in range(self.size):
            self.parents[rank] = rank
            self.linked[rank] = False
        for age in range(self.history):
            place: cython.int = (self.formed - 1 - age) % self.history
            first: cython.int = -1
            for i in range(self.sizes[place]):
                rank = self.window[place * self.group_size + i]
                if self.is_there(rank):
                    if first >= 0:
                        if self.root_of(rank) != self.root_of(first):
                            oldest = self.formed - 1 - age
                        self.parents[self.root_of(rank)] = self.root_of(first)
                        self.linked[first] = self.linked[rank] = True
                    first = rank
        root: cython.int = -1
        for rank in range(self.size):
            if self.linked[rank]:
                if root >= 0 and self.root_of(rank) != root:
                    return True
                root = self.root_of(rank)
        self.connected_until = oldest + self.history
        return False

    def root_of(self, rank):
        while self.parents[rank] != rank:
            self.parents[rank] = self.parents[self.parents[rank]]
            rank = self.parents[rank]
        return rank

    def component_of(self, rank):
        """Return the component of the graph that contains a rank, −1 if the rank is in no group."""
        if not self.linked[rank]:
            return -1
        return self.root_of(rank) if self.frozen else 0

    # The weight generator

    def close_group(self, count):
        """Form the group of the ranks chosen, with weights, and remove them from the queue."""
        i: cython.int
        rank: cython.int
        initial: cython.double = 0
        self.newest = 0
        for i in range(count):
            rank = self.chosen[i]
            self.member_iterations[i] = self.iterations[rank]
            self.newest = max(self.newest, self.member_iterations[i])
            self.shares[i] = 1
            self.ready[rank] = False
            self.since[rank] = self.now
        if self.dynamic and self.each:
            weigh_each(self.member_iterations, count, self.alpha, self.shares)
        elif self.dynamic:
            initial = weigh(self.member_iterations, count, self.alpha, self.nearest, self.shares)
        self.initial = initial
        self.group.clear(self.number)
        self.number += 1
        for i in range(count):
            self.group.add(self.chosen[i], self.shares[i])
        waiting: cython.int = 0
        for i in range(self.waiting):
            if self.ready[self.queue[i]]:
                self.queue[waiting] = self.queue[i]
                waiting += 1
        self.waiting = waiting
        if count > 1:
            self.record(count)
        else:
            self.alone += 1

    # The group history

    def record(self, count):
        """Add the group to the history, in place of the oldest one."""
        i: cython.int
        j: cython.int
        place: cython.int = self.formed % self.history
        share: cython.double = 1 / cython.cast(cython.double, count)
        self.sizes[place] = count
        linked: cython.bint = False
        for i in range(count):
            linked = linked or self.linked[self.chosen[i]]
        if not linked:
            self.connected_until = -1
        for i in range(count):
            self.linked[self.chosen[i]] = True
            self.window[place * self.group_size + i] = self.chosen[i]
        self.recording += 1
        if len(self.taken) > 0:
            for i in range(count):
                self.taken[self.chosen[i]] += 1
                for j in range(count):
                    self.met[self.chosen[i] * self.size + self.chosen[j]] += share
        self.formed += 1
