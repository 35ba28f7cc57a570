"""The parameter server: one rank holds the model; all send it their changes and receive it.

A change has weight 1/P, so that a round of all ranks is one step with their mean. The modes:

- BSP: a round ends when all ranks' changes have arrived; then all receive the model.
- BACKUP: a round ends when all changes but b have arrived; a later one is dropped, and its rank
  receives the model at once. A change has weight 1/(P − b).
- ASP: each change is added, and answered, when it arrives.
- HETE: the same, but a change made on an old model has less weight: 1/(P·s), where s is one plus
  the number of complete rounds of changes added to the model meanwhile.
- RINGMASTER: as ASP, but a change made on a model to which R or more changes were added meanwhile
  is dropped; its rank receives the model all the same.
- ASYNC_LOCAL: as ASP, of changes that each consist of several steps, and with delayed Nesterov
  momentum: a change has weight ε/P, and after every P of them the model looks ahead, by β times
  the sum of all that it has changed, which has decayed by β each time. Ranks tell the server
  their speeds, and it tells them the fastest one's.

A change that a rank hands in outside of calls has weight 1/P in every mode, and no momentum, which
starts again with it.

The server does not wait for a rank that has left, or is about to average with all. Its own
application is one of the ranks.

Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014; Chen
et al., Revisiting Distributed Synchronous SGD, 2016 (BACKUP); Jiang et al., Heterogeneity-Aware
Distributed Parameter Servers, SIGMOD 2017 (HETE); Maranjyan et al., Ringmaster ASGD, ICML 2025
(RINGMASTER: Algorithm 4); Liu et al., Asynchronous Local-SGD Training for Language Modeling, 2024
(ASYNC_LOCAL: Algorithm 3, of c = 0 and N = P).
"""

import array

import cython

from collectives.protocols.peers import PeerProtocol

# The kinds of messages. LAST: a change that is sent outside a call, because its rank joins or
# synchronizes, or the server's answer to it.
PUSH = 2
PULL = 3
LAST = 4

BSP = 0
BACKUP = 1
ASP = 2
HETE = 3
RINGMASTER = 4
ASYNC_LOCAL = 5
MODES = {
    "bsp": BSP,
    "backup": BACKUP,
    "asp": ASP,
    "hete": HETE,
    "ringmaster": RINGMASTER,
    "async-local": ASYNC_LOCAL,
}

ANY_AGE = 2**62


class ParameterServerProtocol(PeerProtocol):
    """One rank of the parameter server method.

    Args:
        port, rank, size: see `PeerProtocol`.
        mode: its name among `MODES`.
        server: the rank that holds the model.
        backups: b, of BACKUP.
        max_age: R, of RINGMASTER.
        outer_momentum, outer_rate: β and ε, of ASYNC_LOCAL.

    Attributes:
        version: that of the model that the application has received, or that the server holds: how
            many rounds have ended (BSP, BACKUP), or how many changes were added to it (the others).
        dropped: on the server, how many changes arrived too late.
        speed: this rank's, in steps per second, which the application sets; 0: unknown.
        fastest: that of the fastest rank, as far as the server knew in the last call; 0: unknown.
        lag: version of the model last received, minus that of the model before.
    """

    def __init__(
        self,
        port,
        rank,
        size,
        mode,
        server,
        backups,
        max_age=None,
        outer_momentum=None,
        outer_rate=None,
    ):
        PeerProtocol.__init__(self, port, rank, size, range(size) if rank == server else [])
        self.mode = MODES[mode]
        self.server = server
        # How many changes a round does not wait for; 0 except in BACKUP.
        self.backups = backups if mode == "backup" else 0
        # How old a change must be to be dropped, where changes are added at once.
        self.max_age = max_age if mode == "ringmaster" else ANY_AGE
        # The weight of a change that is handed in; and of one in a call, which BACKUP and HETE
        # modify.
        self.whole = 1 / size
        self.share = (outer_rate if mode == "async-local" else 1) / size
        self.momentum = outer_momentum if mode == "async-local" else 0
        self.version = 0
        self.held = 0
        self.dropped = 0
        self.lag = 0
        self.speed = 0
        self.fastest = 0
        # On the server: all ranks' speeds, and the highest of them.
        self.speeds = array.array("d", [0]) * len(self.awaited)
        self.highest = 0
        self.came = 0
        self.waiting = array.array("i", [0]) * len(self.awaited)

    def begin(self):
        i: cython.int
        self.came = 0
        self.version = 0
        self.held = 0
        for i in range(len(self.waiting)):
            self.waiting[i] = False
        if self.rank == self.server:
            self.restart_momentum()

    def restart_momentum(self):
        """Let the model look ahead by what changes it from here on."""
        if self.mode == ASYNC_LOCAL:
            self.port.look_ahead(0)

    def start(self):
        """Send the change to the server, and wait for its model."""
        self.calling = True
        if self.rank == self.server:
            self.absorb(self.rank, self.held, self.speed)
        else:
            self.port.write_change(PUSH, self.held, self.speed)
            self.port.post(self.server)

    def received(self, source, kind, number, weight):
        if kind == PUSH:
            # A rank that calls after being away has met all others: they will call as well.
            self.came_back = max(self.came_back, self.away[source])
            self.absorb(source, number, weight)
        elif kind == LAST:
            self.settle(source)
        else:
            self.port.mix(source, 0, 1)
            self.pulled(number, weight)

    def absorb(self, source, number, speed):
        """Add a change to the server's model, or drop it.

        Args:
            source, speed: the rank that has made it, and how fast it is.
            number: the version of the model that it was made on.
        """
        self.note_speed(source, speed)
        rounds: cython.bint = self.mode == BSP or self.mode == BACKUP
        age: cython.longlong = self.version - number
        if age >= (1 if rounds else self.max_age):
            self.dropped += 1
            if source != self.rank:
                self.port.drop(source)
            self.reply(source)
            return
        share: cython.double = self.share
        if self.mode == BACKUP:
            share = 1 / cython.cast(cython.double, self.size - self.backups)
        elif self.mode == HETE:
            share /= 1 + age // self.size
        if source == self.rank:
            self.port.publish(share)
        else:
            self.port.mix(source, 1, share)
        self.averagings += 1
        if rounds:
            self.came += 1
            self.waiting[source] = True
        else:
            self.version += 1
            if self.mode == ASYNC_LOCAL and self.version % self.size == 0:
                self.port.look_ahead(self.momentum)
            self.reply(source)

    def hand_in(self):
        """Send the change since the last call to the server."""
        if self.rank == self.server:
            self.port.publish(self.whole)
            self.restart_momentum()
        else:
            self.calling = True
            self.port.write_change(LAST, self.calls, 0)
            self.port.post(self.server)

    def join(self):
        self.hand_in()
        self.pause()
        PeerProtocol.join(self)

    def settle(self, source):
        """Add a change sent by `hand_in` to the server's model; or note the server's answer."""
        if self.rank == self.server:
            self.port.mix(source, 1, self.whole)
            self.restart_momentum()
            self.port.write(LAST, self.version)
            self.port.post(source)
        else:
            self.calling = False

    def proceed(self):
        """End a round on the server, once enough changes have arrived."""
        i: cython.int
        if self.came == 0:
            return
        active: cython.int = self.size
        for i in range(self.size):
            # A rank whose change is in the round is not missing, whatever it does since.
            if self.is_out(i) and not self.waiting[i]:
                active -= 1
        if self.came < active and self.came < self.size - self.backups:
            return
        self.came = 0
        self.version += 1
        for i in range(self.size):
            if self.waiting[i]:
                self.waiting[i] = False
                self.reply(i)

    def reply(self, rank):
        """Send the server's model to a rank."""
        if rank == self.rank:
            self.pulled(self.version, self.highest)
        else:
            self.port.write_model(PULL, self.version, self.highest)
            self.port.post(rank)

    def note_speed(self, rank, speed):
        """Note a rank's speed; look at all only if it was the fastest, and is slower now."""
        i: cython.int
        former: cython.double = self.speeds[rank]
        self.speeds[rank] = speed
        if speed >= self.highest:
            self.highest = speed
        elif former == self.highest:
            self.highest = 0
            for i in range(len(self.speeds)):
                self.highest = max(self.highest, self.speeds[i])

    def pulled(self, version, fastest):
        """Return from the call with the server's model."""
        self.fastest = fastest
        self.lag = version - self.held
        self.held = version
        if self.rank != self.server:
            self.version = version
        self.calls += 1
        self.calling = False
        self.port.return_model(1)

    def steps_beside(self, most):
        """Return how many steps this rank makes while the fastest one makes `most`, at least 1."""
        if self.speed == 0 or self.fastest == 0:
            return most
        return max(1, cython.cast(cython.longlong, most * self.speed / self.fastest))

    def is_waited_for_by(self, rank):
        return rank == self.server

    def leave(self, failed):
        PeerProtocol.leave(self, failed)
        if self.rank == self.server:
            self.left[self.rank] = True
            self.proceed()

    def pause(self):
        """Let rounds end without this rank, until all resume."""
        PeerProtocol.pause(self)
        if self.rank == self.server:
            self.away[self.rank] = self.pauses
            self.proceed()

    def waits_for(self, rank):
        """Return whether a call waits for a rank; the server's waits for a round's changes."""
        if not self.calling:
            return False
        if self.rank == self.server:
            return not self.waiting[rank] and not self.is_out(rank)
        return rank == self.server
