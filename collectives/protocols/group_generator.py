"""The group generator of Ripples: forms groups on the ranks' requests.

Groups are numbered, and each rank executes its groups in this order. So groups that share a rank
run one after the other, others at the same time, and no deadlock can occur: the members of the
oldest group wait only for each other's requests. The paper's lock vector, queue of pending groups
and acknowledgements (section 4.1) are not needed.

- Random: every request makes a group of the requester and others, drawn uniformly from the ranks
  that make calls, even if they are in groups already. (Section 4.1; Figure 7, Step 3.)
- Buffered: a request gets the oldest group with its rank that the rank has not requested yet. If
  there is none, it makes a random one. (The group buffer of section 5.1, without global division.)
- Smart: as buffered, but if there is no group, all idle ranks are divided into disjoint groups at
  once (the global division, section 5.1). A rank is idle if it has requested all its groups, and
  the other members of the last one have requested that. It is left out if it is behind the
  requester by the threshold or more requests (C_thres, section 5.3). On several nodes there are two
  divisions (Inter-Intra, section 5.2): first one rank of each node, its head, drawn anew, averages
  in groups of these heads, and the others of a node in groups of their own; then all idle ranks of
  a node average, except those that are behind. So only heads average with ranks of other nodes.

Requests are counted from the start, or from the last `restart`. Beyond the paper, a rank that waits
for a group, pauses, or is late is credited with the requests of the fastest rank meanwhile:
otherwise a rank that has waited for a slow rank would itself count as slow, and would always be
grouped with the slow one.

A division makes as few groups as possible of at most the group size, as equal as possible; with
pairs and an odd number of ranks, one group has three. So no rank is left over, with one exception:
if a node has one rank in addition to its head, that rank is in a group by itself, and so makes a
step without an average, as such ranks do in the static schedule (Figure 10). A requester without
any possible partner gets the answer ALONE.

Source: Luo et al., Heterogeneity-Aware Asynchronous Decentralized Training (Ripples), 2019.
"""

import array
import hashlib

import cython

# The results of requests that form no groups: the group exists already, or there is none.
BUFFERED = 0
ALONE = -1

# The most groups that a division puts a rank into.
BUFFER = 2


class GroupGenerator:
    """Forms groups; its events are requests of ranks, and pauses, during which they make none.

    A late rank is in no group until its next request.

    Args:
        size: number of ranks.
        group_size: number of ranks in a group, or the largest number; 2 or more.
        seed: that of its random numbers.
        nodes: the node of each rank, numbered from 0; None: groups are random ones.
        threshold: C_thres, 1 or more.
        absent: a rank that makes no requests; None: there is none.
        buffered: whether a request for a random group gets one made before, if there is any;
            requests for smart groups always do.

    Attributes:
        groups: how many were formed; they are numbered from 0.
        formed: how many of these the last request formed.
        most: the largest number of members of a group.
        room: the largest number of groups that a rank has not begun yet.
        reuses: whether a request gets a group made before, if there is one.
    """

    def __init__(
        self, size, group_size, seed, nodes=None, threshold=4, absent=None, buffered=False
    ):
        self.size = size
        self.group_size = min(group_size, size)
        self.smart = nodes is not None
        self.reuses = self.smart or buffered
        self.threshold = threshold
        digest = hashlib.blake2b(f"groups {seed}".encode(), digest_size=8).digest()
        self.random = 1 + int.from_bytes(digest, "little") % 2147483646
        self.node = array.array("i", nodes or [0] * size)
        self.nodes = max(self.node) + 1
        # Each rank may have formed one random group that a given rank has not begun: it waits for
        # this group before it requests another.
        self.room = BUFFER if self.smart else size
        self.most = min(size, self.group_size)
        if self.smart:
            largest = max(list(self.node).count(node) for node in range(self.nodes))
            self.most = min(size, max(self.group_size + 1, largest))
        self.groups = 0
        self.back = 0
        # The requests credited to each rank; the most of any rank; that maximum when each rank was
        # last credited.
        self.requests = array.array("q", [0]) * size
        self.most_requests = 0
        self.asked_at = array.array("q", [0]) * size
        self.away = array.array("q", [0]) * size
        self.left = array.array("i", (rank == absent for rank in range(size)))
        self.late = array.array("i", [0]) * size
        # The groups that the last request formed: where the members of each begin and end.
        self.formed = 0
        self.filled = 0
        self.members = array.array("i", [0]) * (BUFFER * size)
        self.bounds = array.array("i", [0]) * (BUFFER * size + 1)
        # A smart group has a place until all its members have requested it: the group's number (−1:
        # the place is free), and how many members have not requested it.
        places = BUFFER * size if self.smart else 0
        self.number_at = array.array("q", [-1]) * places
        self.missing_at = array.array("i", [0]) * places
        self.free = array.array("i", range(places))
        self.free_count = places
        # For each rank: the places of the groups that it has not requested; the number of these
        # groups; the place and the number of the group that it requested last.
        self.buffer = array.array("i", [0]) * places
        self.untaken = array.array("i", [0]) * size
        self.taken_place = array.array("i", [-1]) * size
        self.taken_number = array.array("q", [-1]) * size
        # The ranks to be divided, in any order and by node, and the heads.
        self.idle = array.array("i", [0]) * size
        self.sorted = array.array("i", [0]) * size
        self.starts = array.array("i", [0]) * (self.nodes + 2)
        self.heads = array.array("i", [0]) * size

    # Events

    def request(self, rank, pauses):
        """Handle the request for a group of a rank that has paused `pauses` times.

        Returns:
            How many groups the request forms, whose members must be told; BUFFERED if the rank has
            been told of its group already; ALONE if there is no partner for it.
        """
        i: cython.int
        if pauses > self.back:
            # A rank that requests after a pause has met all others: they will request as well.
            for i in range(self.size):
                if not self.is_active(i):
                    self.credit(i)
            self.back = pauses
        if self.late[rank]:
            self.late[rank] = False
            self.credit(rank)
        self.formed = 0
        self.filled = 0
        if self.reuses and self.untaken[rank] > 0:
            self.count(rank)
            self.take(rank)
            return BUFFERED
        if self.smart:
            self.divide(rank)
        else:
            self.draw_group(rank)
        self.count(rank)
        self.groups += self.formed
        if self.formed == 0:
            self.taken_place[rank] = -1
            return ALONE
        if self.reuses:
            self.give()
            self.take(rank)
        return self.formed

    def pause(self, rank, pauses, leaving):
        """Note that a rank pauses, for the n-th time, or leaves: no rank waits for its requests."""
        if pauses > self.back and pauses > self.away[rank]:
            # While it pauses, it may let go of groups whenever others wait; the first time counts.
            self.asked_at[rank] = self.most_requests
        self.away[rank] = pauses
        self.left[rank] = self.left[rank] or leaving
        self.forget(rank)

    def lag(self, rank):
        """Note that a rank is late: no rank waits for its next request."""
        self.late[rank] = True
        self.forget(rank)

    def forget(self, rank):
        """Note that a rank takes part in all its groups without a request."""
        while self.untaken[rank] > 0:
            self.take(rank)
        self.taken_place[rank] = -1

    def restart(self):
        """Count requests anew: all ranks have paused, and continue at the same call."""
        i: cython.int
        self.most_requests = 0
        for i in range(self.size):
            self.requests[i] = 0
            self.asked_at[i] = 0

    def write(self, index, group):
        """Write one of the groups that the last request formed into the record `group`."""
        i: cython.int
        group.clear(self.groups - self.formed + index)
        for i in range(self.bounds[index], self.bounds[index + 1]):
            group.add(self.members[i], 1)

    # Decisions

    def is_active(self, rank):
        """Return whether a rank makes requests, as far as is known."""
        return not (self.left[rank] or self.late[rank]) and self.away[rank] <= self.back

    def is_idle(self, rank):
        """Return whether a rank is in no group that some member has not requested."""
        place: cython.int = self.taken_place[rank]
        if self.untaken[rank] > 0:
            return False
        return place < 0 or self.number_at[place] != self.taken_number[rank]

    def draw_group(self, rank):
        """Form a group of the requester and random others."""
        i: cython.int
        count: cython.int = 0
        other: cython.int
        for i in range(self.size):
            if i != rank and self.is_active(i):
                self.idle[count] = i
                count += 1
        if count == 0:
            return
        self.add(rank)
        for i in range(min(self.group_size - 1, count)):
            other = i + self.draw(count - i)
            self.idle[i], self.idle[other] = self.idle[other], self.idle[i]
            self.add(self.idle[i])
        self.end_group()

    def divide(self, rank):
        """Divide the requester and the idle ranks that are not too far behind it."""
        i: cython.int
        count: cython.int = 0
        for i in range(self.size):
            if i == rank or (
                self.is_active(i)
                and self.is_idle(i)
                and self.requests[rank] - self.requests[i] < self.threshold
            ):
                self.idle[count] = i
                count += 1
        self.shuffle(self.idle, count)
        if self.nodes == 1:
            self.cut(self.idle, 0, count)
        elif count > 1:
            self.sort_by_node(count)
            self.divide_heads()
            self.divide_nodes()

    def sort_by_node(self, count):
        """Sort the idle ranks by node; ranks of one node keep their order."""
        i: cython.int
        node: cython.int
        for node in range(self.nodes + 2):
            self.starts[node] = 0
        for i in range(count):
            self.starts[self.node[self.idle[i]] + 2] += 1
        for node in range(self.nodes):
            self.starts[node + 2] += self.starts[node + 1]
        for i in range(count):
            node = self.node[self.idle[i]]
            self.sorted[self.starts[node + 1]] = self.idle[i]
            self.starts[node + 1] += 1

    def divide_heads(self):
        """Form the groups of the first division: heads of nodes, and the others of each node."""
        i: cython.int
        node: cython.int
        begin: cython.int
        share: cython.int
        count: cython.int = 0
        done: cython.int = 0
        for node in range(self.nodes):
            if self.starts[node + 1] > self.starts[node]:
                self.heads[count] = node
                count += 1
        if count == 1:
            node = self.heads[0]
            self.cut(self.sorted, self.starts[node], self.starts[node + 1])
            return
        self.shuffle(self.heads, count)
        while done < count:
            share = self.share(count - done)
            for i in range(done, done + share):
                self.add(self.sorted[self.starts[self.heads[i]]])
            self.end_group()
            done += share
        for node in range(self.nodes):
            begin = self.starts[node] + 1
            if self.starts[node + 1] - begin == 1:
                self.add(self.sorted[begin])
                self.end_group()
            else:
                self.cut(self.sorted, begin, self.starts[node + 1])

    def divide_nodes(self):
        """Form the groups of the second division: all of a node, except those that are behind.

        A rank that is behind delays no other in the first division, but here the others would wait
        for its next request.
        """
        i: cython.int
        node: cython.int
        most: cython.longlong
        count: cython.int
        for node in range(self.nodes):
            most = 0
            for i in range(self.starts[node], self.starts[node + 1]):
                most = max(most, self.requests[self.sorted[i]])
            count = 0
            for i in range(self.starts[node], self.starts[node + 1]):
                if most - self.requests[self.sorted[i]] < self.threshold:
                    self.idle[count] = self.sorted[i]
                    count += 1
            if count > 1:
                for i in range(count):
                    self.add(self.idle[i])
                self.end_group()

    # Forming groups

    def cut(self, ranks, begin, end):
        """Form groups of ranks[begin:end], in this order; a single rank is in none."""
        i: cython.int
        share: cython.int
        while end - begin > 1:
            share = self.share(end - begin)
            for i in range(begin, begin + share):
                self.add(ranks[i])
            self.end_group()
            begin += share

    def share(self, count):
        """Return the next group's size, of `count` ranks, 2 or more; sizes differ by 1 at most."""
        groups: cython.int = (count + self.group_size - 1) // self.group_size
        if 2 * groups > count:
            groups = count // 2
        return (count + groups - 1) // groups

    def add(self, rank):
        """Add a member to the group being formed."""
        self.members[self.filled] = rank
        self.filled += 1

    def end_group(self):
        """Complete the group being formed."""
        self.formed += 1
        self.bounds[self.formed] = self.filled

    def give(self):
        """Put the groups that were formed into their members' buffers."""
        index: cython.int
        place: cython.int
        rank: cython.int
        i: cython.int
        if not self.smart:
            for i in range(self.filled):
                self.untaken[self.members[i]] += 1
            return
        for index in range(self.formed):
            self.free_count -= 1
            place = self.free[self.free_count]
            self.number_at[place] = self.groups - self.formed + index
            self.missing_at[place] = self.bounds[index + 1] - self.bounds[index]
            for i in range(self.bounds[index], self.bounds[index + 1]):
                rank = self.members[i]
                self.buffer[BUFFER * rank + self.untaken[rank]] = place
                self.untaken[rank] += 1

    def take(self, rank):
        """Note that a rank has requested its oldest group."""
        first: cython.int = BUFFER * rank
        place: cython.int
        self.untaken[rank] -= 1
        if not self.smart:
            return
        place = self.buffer[first]
        self.buffer[first] = self.buffer[first + 1]
        self.taken_place[rank] = place
        self.taken_number[rank] = self.number_at[place]
        self.missing_at[place] -= 1
        if self.missing_at[place] == 0:
            self.make_up(place)
            self.number_at[place] = -1
            self.free[self.free_count] = place
            self.free_count += 1

    def count(self, rank):
        """Count a request of a rank."""
        self.requests[rank] += 1
        self.most_requests = max(self.most_requests, self.requests[rank])
        self.asked_at[rank] = self.most_requests

    def make_up(self, place):
        """Credit the members of a fully requested group with the requests made while they waited.

        These are the requests of the fastest rank.
        """
        i: cython.int
        for i in range(self.size):
            if self.taken_place[i] == place and self.taken_number[i] == self.number_at[place]:
                self.credit(i)

    def credit(self, rank):
        """Credit a rank with the requests of the fastest rank since its last credit."""
        self.requests[rank] += self.most_requests - self.asked_at[rank]
        self.asked_at[rank] = self.most_requests

    def shuffle(self, values, count):
        """Put the first `count` values into a random order."""
        i: cython.int
        other: cython.int
        for i in range(count - 1):
            other = i + self.draw(count - i)
            values[i], values[other] = values[other], values[i]

    def draw(self, count):
        """Return a random number below `count`, by Park and Miller's generator."""
        self.random = self.random * 48271 % 2147483647
        return self.random % count
