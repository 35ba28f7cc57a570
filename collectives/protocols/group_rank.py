"""What one rank does next where a protocol forms groups: contributions, calls, and interruptions.

A `GroupProtocol` decides which ranks average together, and requests averages and returns of its
port. The class here decides what each average takes from the rank, where its mean goes, and what a
call returns: it takes one requested step after the other, and has it executed by the same port.

A rank has up to four vectors: the application's X, while it is in a call; the SCRATCH, which takes
its place once an exception has ended the call, and is zeros where the rank contributes nothing;
and of a passive rank what the application last got, the RESULT, and the mean of that with others
since, the SNAPSHOT.
"""

import cython

from collectives.protocols.formed_groups import Group, GroupPort
from collectives.protocols.rank import StepsProtocol

if not cython.compiled:  # else the .pxd declares them
    from collectives.protocols.contribution import NOWHERE, RESULT, SCRATCH, SNAPSHOT, X
    from collectives.protocols.rank import CONTRIBUTE, END_AVERAGE, RETURN, WAIT


class GroupRankPort(GroupPort):
    """Executes the requested steps as well.

    The first request's average is of the rank's `source`, or of X if that is `lent`. `adopt` copies
    X to the `source`, and `redirect` stores the mean in the `target`.
    """

    # The requests, in their order

    def requested(self):
        """Return the first request's step: CONTRIBUTE to an average, RETURN, or WAIT for one."""
        raise NotImplementedError

    def finish(self):
        """Remove the first request."""
        raise NotImplementedError

    def is_under_way(self):
        """Return whether requests or messages are pending."""
        raise NotImplementedError

    def now(self):
        """Return the time, as protocols are told it."""
        raise NotImplementedError

    # Steps

    def knows_finite(self):
        """Return whether it is known if the application's vector is finite, without waiting."""
        raise NotImplementedError

    def is_in_place(self):
        """Return whether the first request's average replaces vectors in memory that ranks share.

        It averages the target itself, and reads no vector without weight.
        """
        raise NotImplementedError

    def changed(self):
        """Note that the application's vector has changed: it may be finite or not."""
        raise NotImplementedError


class GroupRankProtocol(StepsProtocol):
    """One rank of a method in which some rule forms groups.

    Args:
        vectors: its `Vectors`.
        size: the number of ranks.

    Attributes:
        forming: its `GroupProtocol`.
        in_call: whether the average that was last begun is one of the application's call.
        present: whether the call has the application's vector.
        kept: whether SCRATCH replaces that, since an exception has ended the call.
        lent, source, weight, target: as those of `ContributionProtocol`.
        moved: whether SNAPSHOT, rather than RESULT, is what a passive rank contributes.
        last: the record of the last group of the application's call.
        total, timely: the weight of the mean of this group; whether the rank's vector counted.
        changed: whether the call has changed the application's vector.
        nonfinite, averages, passive: counts of vectors that were left out, of averages, and of
            those outside calls.
    """

    def __init__(self, vectors, size):
        StepsProtocol.__init__(self)
        self.done = True
        self.vectors = vectors
        self.port = None
        self.forming = None
        self.record = Group(room=size)
        self.in_call = False
        self.present = False
        self.kept = False
        self.gives = False
        self.lent = False
        self.source = SCRATCH
        self.weight = 0
        self.target = NOWHERE
        self.moved = False
        # Whether the application does not have RESULT, since an exception has ended its call.
        self.unreturned = False
        self.last = Group(room=size)
        self.total = 1
        self.timely = True
        self.changed = False
        self.nonfinite = 0
        self.averages = 0
        self.passive = 0

    def attach(self, port, forming):
        """Execute by this `GroupRankPort` what this `GroupProtocol` requests of it."""
        self.port = self.executing = port
        self.forming = forming

    def begin(self):
        """Begin, when all ranks are ready; a passive rank's model is X."""
        self.go_on_from()
        self.forming.passed(self.port.now())
        self.forming.begin()

    # Steps

    def next_step(self):
        if self.passing != WAIT:
            return WAIT
        if self.begun:
            return END_AVERAGE if self.port.is_exchanged() else WAIT
        step: cython.int = self.port.requested()
        if step == WAIT or (self.forming.passive and not self.port.is_here()):
            return WAIT
        if step == CONTRIBUTE and self.present and not self.port.knows_finite():
            return WAIT
        return step

    def take(self, step):
        if step == END_AVERAGE:
            self.begun = False
            self.end_average(self.port.total_weight(), self.gives)
            return
        if step == CONTRIBUTE:
            self.port.under_way(self.record)
            # The application may begin a call during the pass.
            self.in_call = self.forming.calling
        self.make_pass(step)

    def moves(self, step):
        if step == RETURN:
            return self.forming.passive
        return self.record.size > 1 or (self.in_call and self.moved)

    def read_or_write(self, step):
        if step == RETURN:
            if self.forming.passive:
                self.add_moved()
                if not self.kept:
                    self.vectors.copy(RESULT, X)
                elif self.gives:
                    self.vectors.copy(RESULT, SCRATCH)
            return
        if self.in_call:
            self.add_moved()
        if self.record.size > 1:
            self.contribute()

    def go_on(self, step):
        if step == RETURN:
            self.end_call()
        elif self.record.size > 1:
            self.begun = True
            self.port.begin_average(self.record.number)
        else:
            self.end_average(self.record.weights[0], True)

    # Averages

    def contribute(self):
        """Determine what an average takes from this rank, and where its mean goes."""
        own: cython.double = self.record.weights[self.record.index_of(self.forming.rank)]
        self.lent = False
        self.source = SCRATCH
        self.target = SCRATCH
        if not self.in_call:
            self.gives = self.moved or (self.forming.passive and self.vectors.all_finite(RESULT))
            if self.gives:
                self.source = SNAPSHOT if self.moved else RESULT
                self.target = SNAPSHOT
            elif self.forming.passive:
                self.nonfinite += 1
        elif not self.kept:
            self.gives = self.lent = self.vectors.all_finite(X)
            self.target = X
            if not self.gives:
                self.nonfinite += 1
        self.weight = own if self.gives else 0
        if not self.port.is_in_place():
            # What does not count is not to be read, either.
            if not self.gives:
                self.vectors.zero(SCRATCH)
        elif self.source == RESULT:
            self.vectors.copy(SNAPSHOT, RESULT)
        elif not (self.in_call or self.gives):
            self.target = NOWHERE

    def end_average(self, total, timely):
        """End a group's average; one of one rank changes nothing.

        Args:
            total: the weight of its mean.
            timely: whether this rank's vector counted, where that is the application's.
        """
        replaced: cython.bint = self.record.size > 1 and total > 0
        self.port.executed(self.record.number)
        self.averages += 1
        if self.in_call:
            self.port.under_way(self.last)
            self.total = total
            self.timely = timely
            if replaced:
                self.gives = True
                self.note_change()
        else:
            self.passive += 1
            self.moved = self.moved or (replaced and self.target == SNAPSHOT)
        self.port.finish()
        self.forming.passed(self.port.now())
        self.forming.reduced(self.record)

    def add_moved(self):
        """Add to the application's vector what averages have changed since its last call."""
        if self.moved and self.present and not self.unreturned:
            self.vectors.add_change(X)
            self.note_change()
        self.moved = False

    def note_change(self):
        """Note that the application's vector differs from what it passed."""
        self.changed = True
        self.port.changed()

    # The application

    def call(self):
        """Begin the application's call with its vector, X."""
        self.begin_call(True)

    def pass_by(self):
        """Make a call that averages nothing, without a vector: see `passes_by`."""
        self.begin_call(False)

    def passes_by(self):
        """Return whether the next call averages nothing."""
        return not (self.forming.passive or self.forming.averages())

    def begin_call(self, present):
        self.done = False
        self.present = present
        self.last.clear(0)
        self.total = 1
        self.timely = True
        self.changed = False
        self.forming.passed(self.port.now())
        self.forming.call()

    def end_call(self):
        """Complete the application's call, whose averages are complete."""
        self.unreturned = self.kept
        self.present = False
        self.kept = False
        self.done = True
        self.port.finish()
        self.forming.passed(self.port.now())
        self.forming.returned()
        self.port.returns(self.last.size > 1)

    def continue_with(self):
        """Add to X what averages have changed since the last call, as a call would."""
        self.present = True
        self.add_moved()
        self.present = False

    def go_on_from(self):
        """Take X, from which the application continues, as a passive rank's model."""
        if self.forming.passive:
            self.vectors.copy(RESULT, X)
        self.moved = False
        self.unreturned = False

    # What an exception interrupts

    def interrupt(self):
        """End the application's call because of an exception, between two steps.

        The rank's part in its groups goes on, with what the application has passed; without a
        vector if an average outside calls still uses the scratch.
        """
        if not self.present:
            return
        self.present = False
        self.kept = True
        if self.begun and self.in_call:
            self.port.adopt()
            self.target = SCRATCH
            self.lent = False
            self.port.redirect()
            return
        self.gives = not (self.begun and self.target == SCRATCH) and self.vectors.all_finite(X)
        if self.gives:
            self.vectors.copy(SCRATCH, X)

    # What drivers ask

    def is_busy(self):
        """Return whether work is in flight."""
        return self.forming.calling or self.port.is_under_way()

    def has_caught_up(self):
        """Return whether what an exception has interrupted is complete."""
        return not self.forming.calling
