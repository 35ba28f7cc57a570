# cython: boundscheck=False, wraparound=False
"""The base class of methods in which ranks send vectors to each other.

Each rank has a model X, which its application changes between two calls and receives in each. A
protocol is told of calls and messages, and decides by its port's methods what becomes of the model
and what is sent. Messages from one rank to another arrive in the order in which they were sent.
"""

import array

import cython

# The kinds of messages with which a rank says that it makes no calls: for good, or until all have
# done something together, for the time that is its number. Methods have others, from 2 on.
LEAVE = 0
AWAY = 1


class Port:
    """What a protocol can do: the driver does it, over MPI, in a test or in simulated time.

    X is the rank's model. D is the change that the application made since it last got a model, as
    of its last call. A message that holds a vector is kept until `mix`, `halve` or `drop` uses it;
    these mean the oldest one of its source.
    """

    def write(self, kind, number):
        """Write the message that `post` sends: a kind and a number."""
        raise NotImplementedError

    def write_model(self, kind, number, weight):
        """Write one with X, and a weight."""
        raise NotImplementedError

    def write_change(self, kind, number):
        """Write one with D."""
        raise NotImplementedError

    def post(self, destination):
        """Send the message last written; to several ranks, call after call."""
        raise NotImplementedError

    def mix(self, source, keep, share):
        """X = keep · X + share · the message from this rank; return the message's weight."""
        raise NotImplementedError

    def halve(self, source, kind, number):
        """Send half of what X is more than the message back, and take it from X."""
        raise NotImplementedError

    def drop(self, source):
        """The message from this rank is of no use."""
        raise NotImplementedError

    def scale(self, factor):
        """X = factor · X"""
        raise NotImplementedError

    def publish(self, scale):
        """X += scale · D"""
        raise NotImplementedError

    def return_model(self, scale):
        """The application gets scale · X, and its call returns."""
        raise NotImplementedError


class PeerProtocol:
    """One rank of a method in which ranks send each other vectors.

    Args:
        port, rank, size: what does it; this rank, and how many there are.
        awaited: the ranks that this one may wait for.

    Attributes:
        calls: how many calls the application has completed or skipped, which is its next one's
            number; where messages are numbered, by this. `skipped`: how many of them it skipped.
        calling: whether the application is in a call, which ends with `Port.return_model`.
        leaving: whether the application makes no more calls; messages are still answered.
        paused: whether nothing new is to be begun.
        joined: whether the application makes no more calls before all have joined, and this rank
            makes those that others need, without a change, where the method `follows`.
        queues: whether vectors are taken in as they come, and kept until the method uses or drops
            them: it bounds how many there are.
        missing: a rank that has left or is away, and that the application waits for in vain;
            −1: none.
        pauses, came_back: how often the application did something with all ranks, and has gone on.
        averagings: how often the model was mixed with others'; `passive`: of these, how often
            because another rank asked for it.
    """

    def __init__(self, port, rank, size, awaited):
        self.port = port
        self.rank = rank
        self.size = size
        self.calls = 0
        self.skipped = 0
        self.calling = False
        self.leaving = False
        self.paused = False
        self.joined = False
        self.follows = False
        self.queues = False
        # How many calls some rank has made, as far as this one knows.
        self.heard = 0
        self.missing = -1
        self.averagings = 0
        self.passive = 0
        self.awaited = array.array("i", sorted(awaited))
        # Of each of these: how many of its messages are there and not yet used; whether it has
        # left; which time it was that it was last away for.
        self.messages = array.array("q", [0]) * len(self.awaited)
        self.left = array.array("q", [0]) * len(self.awaited)
        self.away = array.array("q", [0]) * len(self.awaited)
        self.pauses = 0
        self.came_back = 0

    def restart(self, calls):
        """All ranks go on from their models as they are now, after so many calls."""
        i: cython.int
        self.calls = calls
        self.heard = calls
        self.calling = False
        self.paused = False
        self.joined = False
        self.came_back = self.pauses
        for i in range(len(self.messages)):
            self.messages[i] = 0
        self.begin()

    def begin(self):
        """All ranks are there."""

    def call(self):
        """The application has made a change, and wants a model."""
        self.start()
        self.advance()

    def start(self):
        """Begin a call."""
        self.calling = True

    def skip(self, count):
        """The application's next call has a number so many higher."""
        self.calls += count
        self.skipped += count

    def arrived(self, source, kind, number, weight):
        """A message has come."""
        if kind == LEAVE:
            self.left[self.index_of(source)] = True
        elif kind == AWAY:
            self.away[self.index_of(source)] = number
        else:
            self.received(source, kind, number, weight)
        self.advance()

    def received(self, source, kind, number, weight):
        """A message of one of the method's own kinds has come."""
        self.messages[self.index_of(source)] += 1

    def index_of(self, rank):
        """Where a rank is among those awaited; −1: it is none of them."""
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
        """Do what can be done now."""
        self.proceed()
        while self.joined and self.follows and not self.calling and self.calls < self.heard:
            self.start()
            self.proceed()
        self.look_for_missing()

    def proceed(self):
        """Do what the method can do now."""

    def look_for_missing(self):
        """See whether the application waits for a rank of which nothing comes."""
        i: cython.int
        if not self.calling:
            return
        for i in range(len(self.awaited)):
            if self.is_out(i) and self.waits_for(self.awaited[i]):
                self.missing = self.awaited[i]

    def is_out(self, i):
        """Whether nothing comes of the i-th of those awaited, for now or for good."""
        return self.left[i] != 0 or self.away[i] > self.came_back

    def tell(self, kind, number):
        """Send this to all who may wait for this rank."""
        i: cython.int
        self.port.write(kind, number)
        for i in range(self.size):
            if i != self.rank and self.is_waited_for_by(i):
                self.port.post(i)

    def leave(self):
        """The application makes no more calls."""
        self.leaving = True
        self.paused = True
        self.tell(LEAVE, self.calls)

    def pause(self):
        """The application is about to do what all ranks do together: begin nothing new."""
        self.paused = True
        self.pauses += 1
        self.tell(AWAY, self.pauses)

    def resume(self):
        """The application goes on."""
        self.paused = False
        self.came_back = self.pauses
        self.advance()

    def hand_in(self):
        """Give what the application has changed since its last call to who keeps the model."""

    def join(self):
        """The application makes no more calls until all ranks have joined."""
        self.joined = True
        self.paused = True
        self.advance()

    def catch_up(self, calls):
        """All ranks have joined, and none has made more calls than so many."""
        if self.follows:
            self.heard = calls
            self.advance()
        else:
            self.calls = calls

    def is_waited_for_by(self, rank):
        """Whether a rank may wait for what this one does."""
        return False

    def is_quiet(self):
        """Whether nothing is under way beside the application that this rank has begun."""
        return True

    def factor(self):
        """What X is multiplied by for the application."""
        return 1

    def waits_for(self, rank):
        """Whether the application waits for something of a rank now."""
        return False

    def needs(self):
        """Return what the application waits for now, in words, and the ranks that it is due from.

        Only where not each rank that it waits for is to send the same.
        """
        return {}
