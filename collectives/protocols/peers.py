"""The base class of methods in which ranks send vectors to each other.

Each rank has a model X, which its application changes between two calls and receives in each. A
protocol receives calls and messages as events, and calls its port to change the model and to send
messages. Messages from one rank to another arrive in the order in which they were sent.
"""

import array

import cython

# The kinds of messages that say that a rank makes no more calls (LEAVE), or none until an operation
# of all ranks is complete, counted by the message's number (AWAY). Methods use kinds from 2 on.
LEAVE = 0
AWAY = 1


class Port:
    """The actions of a protocol: a driver executes them over MPI, in a test or in simulated time.

    X is the rank's model, S an earlier one. D is the change that the application made since it last
    received a model, as of its last call. A message that holds a vector is kept until `mix`,
    `halve` or `drop` uses it; these use the oldest one from their source.
    """

    def write(self, kind, number):
        """Write the message that `post` sends: a kind and a number."""
        raise NotImplementedError

    def write_model(self, kind, number, weight):
        """Write a message with X and a weight."""
        raise NotImplementedError

    def write_change(self, kind, number, weight):
        """Write a message with D and a weight."""
        raise NotImplementedError

    def post(self, destination):
        """Send the message last written; one call for each destination."""
        raise NotImplementedError

    def mix(self, source, keep, share):
        """X = keep · X + share · the message from this rank; return the message's weight."""
        raise NotImplementedError

    def halve(self, source, kind, number):
        """Send half of X minus the message's vector back, and subtract it from X."""
        raise NotImplementedError

    def drop(self, source):
        """Discard the message from this rank."""
        raise NotImplementedError

    def scale(self, factor):
        """X = factor · X"""
        raise NotImplementedError

    def look_ahead(self, momentum):
        """X, S = X + momentum · (X − S), X; S is not read where the momentum is 0."""
        raise NotImplementedError

    def publish(self, scale):
        """X += scale · D"""
        raise NotImplementedError

    def return_model(self, scale):
        """Return from the application's call, with scale · X."""
        raise NotImplementedError


class PeerProtocol:
    """One rank of a method in which ranks send each other vectors.

    Args:
        port, rank, size: the `Port` that executes actions; this rank; the number of ranks.
        awaited: the ranks that this one may wait for.

    Attributes:
        calls: how many calls the application has completed or skipped, which is the number of its
            next one; messages are numbered by it. `skipped`: how many of them it skipped.
        calling: whether the application is in a call, which ends with `Port.return_model`.
        leaving: whether the application makes no more calls; messages are still answered.
        paused: whether nothing new is to be begun.
        joined: whether the application makes no more calls before all have joined, and this rank
            makes those that others need, without a change, where the method `follows`.
        queues: whether vectors are received as they arrive, and kept until the method uses or drops
            them: the method bounds how many there are.
        missing: a rank that has left or is away, and that the application waits for in vain;
            −1: none.
        pauses, came_back: how many operations of all ranks the application has begun, and after how
            many of them it has resumed.
        averagings: how often the model was mixed with others'; `passive`: how many of these because
            another rank requested it.
    """

    def __init__(self, port, rank, size, awaited):
        self.port = port
        self.rank = rank
        self.size = size
        self.calls = 0
        self.skipped = 0
        self.calling = False
        self.leaving = False
        # Whether the others are still to be told that it is.
        self.departing = False
        self.paused = False
        self.joined = False
        self.follows = False
        self.queues = False
        # The most calls made by any rank, as far as this one knows.
        self.most_calls = 0
        self.missing = -1
        self.averagings = 0
        self.passive = 0
        self.awaited = array.array("i", sorted(awaited))
        # For each of these: how many of its messages have arrived and are unused; whether it has
        # left; the number of its last AWAY message.
        self.messages = array.array("q", [0]) * len(self.awaited)
        self.left = array.array("q", [0]) * len(self.awaited)
        self.away = array.array("q", [0]) * len(self.awaited)
        self.pauses = 0
        self.came_back = 0

    def restart(self, calls):
        """Continue from the current models, as all ranks do, after so many calls."""
        i: cython.int
        self.calls = calls
        self.most_calls = calls
        self.calling = False
        self.paused = False
        self.joined = False
        self.came_back = self.pauses
        for i in range(len(self.messages)):
            self.messages[i] = 0
        self.begin()

    def begin(self):
        """Begin, when all ranks are ready."""

    def call(self):
        """Begin a call of the application, which has made a change and requests a model."""
        self.start()
        self.advance()

    def start(self):
        """Begin a call."""
        self.calling = True

    def skip(self, count):
        """Increase the number of the application's next call by `count`."""
        self.calls += count
        self.skipped += count

    def arrived(self, source, kind, number, weight):
        """Handle a message that has arrived."""
        if kind == LEAVE:
            self.left[self.index_of(source)] = True
        elif kind == AWAY:
            self.away[self.index_of(source)] = number
        else:
            self.received(source, kind, number, weight)
        self.advance()

    def received(self, source, kind, number, weight):
        """Handle a message of one of the method's own kinds."""
        self.messages[self.index_of(source)] += 1

    def index_of(self, rank):
        """Return the index of a rank among those awaited, −1 if it is none of them."""
        first: cython.int = 0
        last: cython.int = len(self.awaited)
        while first < last:
            middle: cython.int = (first + last) // 2
            if self.awaited[middle] < rank:
                first = middle + 1
            else:
                last = middle
        if first < len(self.awaited) and self.awaited[first] == rank:
            return first
        return -1

    def advance(self):
        """Do everything that has become possible."""
        self.proceed()
        while self.joined and self.follows and not self.calling and self.calls < self.most_calls:
            self.start()
            self.proceed()
        self.look_for_missing()
        self.depart()

    def proceed(self):
        """Do what the method can do now."""

    def look_for_missing(self):
        """Set `missing` if the application waits for a rank that has left or is away."""
        i: cython.int
        if not self.calling:
            return
        for i in range(len(self.awaited)):
            if self.is_out(i) and self.waits_for(self.awaited[i]):
                self.missing = self.awaited[i]

    def is_out(self, i):
        """Return whether the i-th awaited rank sends nothing, for now or for good."""
        return self.left[i] != 0 or self.away[i] > self.came_back

    def announce(self, kind, number):
        """Send this message to all ranks that may wait for this one."""
        i: cython.int
        self.port.write(kind, number)
        for i in range(self.size):
            if i != self.rank and self.is_waited_for_by(i):
                self.port.post(i)

    def leave(self, failed):
        """Note that the application makes no more calls.

        If a rank has `failed`, a notice of that ends the others' calls, and says why.
        """
        self.leaving = True
        self.paused = True
        self.departing = not failed
        self.depart()

    def depart(self):
        """Tell the others that this rank has left, once it owes them nothing that it can send."""
        if self.departing and (self.missing >= 0 or not self.owes()):
            self.departing = False
            self.announce(LEAVE, self.calls)

    def owes(self):
        """Return whether a call that an exception has ended is still to send what others need."""
        return False

    def pause(self):
        """Begin nothing new: the application is about to enter an operation of all ranks."""
        self.paused = True
        self.pauses += 1
        self.announce(AWAY, self.pauses)

    def resume(self):
        """Note that the application makes calls again."""
        self.paused = False
        self.came_back = self.pauses
        self.advance()

    def hand_in(self):
        """Send the application's change since its last call to the rank that keeps the model."""

    def join(self):
        """Note that the application makes no more calls until all ranks have joined."""
        self.joined = True
        self.paused = True
        self.advance()

    def catch_up(self, calls):
        """Continue after so many calls, the most of any rank, since all have joined."""
        if self.follows:
            self.most_calls = calls
            self.advance()
        else:
            self.calls = calls

    def is_waited_for_by(self, rank):
        """Return whether a rank may wait for messages of this one."""
        return False

    def is_quiet(self):
        """Return whether nothing that this rank has begun is in progress in the background."""
        return True

    def factor(self):
        """Return the factor by which X is multiplied for the application."""
        return 1

    def waits_for(self, rank):
        """Return whether the application waits for a message from a rank now."""
        return False

    def needs(self):
        """Return what the application waits for now, in words, and the ranks that must send it.

        Only where the ranks that it waits for do not all have to send the same.
        """
        return {}
