"""What one rank does with its model and its application's changes, where ranks send vectors.

A `PeerProtocol` decides what ranks send each other, and when a call publishes, mixes and returns.
The class here is its port. It decides what that means for the rank's vectors: when and of what the
application's change is recorded, what a call publishes, when a call begins whose vector is
arriving, and what an exception interrupts. It has each action executed by a port of its own.

A rank has up to three vectors: the application's U, while it is in a call; its model X; and D, what
the application last got, and from its call on its change of that. While that is X as it is, it is
stored nowhere else.
"""

import cython

from collectives.protocols.peers import Port

if not cython.compiled:  # else the .pxd declares them
    from collectives.protocols.peers import LEAVE


class PeerRankPort(Port):
    """Executes a rank's actions: over MPI, in simulated time, or in a test.

    Those of `Port` do here what they say, and no more. Actions on vectors are executed in order,
    possibly later, unless they are to be at once.
    """

    # Vectors

    def record(self, against_model):
        """D = U − D, or where the application got X as it is, D = U − X."""
        raise NotImplementedError

    def save(self):
        """D = X"""
        raise NotImplementedError

    def clear(self):
        """D = 0"""
        raise NotImplementedError

    def keep(self):
        """D = U"""
        raise NotImplementedError

    def replace(self):
        """X = U, which is X + D without rounding; that change counts as published."""
        raise NotImplementedError

    def keep_model(self, scale):
        """D = scale · X, in place of `return_model` where the application is in no call."""
        raise NotImplementedError

    def hold(self):
        """D = U, at once; no action that uses D is pending."""
        raise NotImplementedError

    def load(self):
        """X = U, at once, and discard the messages that are not in use; no action is pending."""
        raise NotImplementedError

    def adopt(self):
        """Copy what pending actions have not read of U; return whether one had yet to write it."""
        raise NotImplementedError

    # What is known

    def is_change_finite(self, against_model):
        """Return whether U's change of D, or of X, is finite."""
        raise NotImplementedError

    def is_checked(self):
        """Return whether the device of an arriving U has checked it, or never will."""
        raise NotImplementedError

    def knows_change(self, bounded):
        """Return whether the device's check tells if the change is finite.

        Args:
            bounded: whether it has also checked what the application last got.
        """
        raise NotImplementedError

    def is_here(self):
        """Return whether all of U has arrived, or never will."""
        raise NotImplementedError

    def is_lost(self):
        """Return whether U will never arrive: its device has failed."""
        raise NotImplementedError

    def takes_whole(self):
        """Return whether actions are executed on whole vectors, rather than on what has arrived."""
        raise NotImplementedError

    def is_pending(self):
        """Return whether actions on vectors are pending."""
        raise NotImplementedError

    def answers(self):
        """Return whether pending actions use U, or store what the application got."""
        raise NotImplementedError


class PeerRankProtocol(Port):
    """One rank of a method in which ranks send each other vectors.

    Args:
        port: the `PeerRankPort` that executes actions.

    Attributes:
        exchanging: its `PeerProtocol`, of which this is the port.
        epoch: the number of restarts of all ranks; messages of earlier ones do not count.
        present: whether the application's call, which has U, is to return the model.
        same: whether what the application last got is X as it is, and stored nowhere else.
        changed: whether the application's change is to be published.
        unrecorded: whether it has still to be recorded in D.
        against_model: whether it is then a change of X, rather than of D.
        unreturned: whether the application lacks the last model, since an exception ended its call.
        bounded: whether it got that by way of a device that has checked its bounds.
        began: whether the last call whose vector was awaited has begun.
        nonfinite: how many changes were excluded as they were not finite, or were not known after
            an interrupted call.
    """

    def __init__(self, port):
        self.port = port
        self.exchanging = None
        self.epoch = 0
        self.present = False
        self.same = True
        self.changed = False
        self.unrecorded = False
        self.against_model = False
        self.unreturned = False
        self.bounded = False
        self.began = False
        self.nonfinite = 0

    def attach(self, exchanging):
        """Set the `PeerProtocol` whose port this is."""
        self.exchanging = exchanging

    # What the protocol has done

    def write(self, kind, number):
        self.port.write(kind, number)

    def write_model(self, kind, number, weight):
        self.port.write_model(kind, number, weight)

    def write_change(self, kind, number, weight):
        self.keep_apart()
        if not self.changed:
            self.port.clear()
        self.port.write_change(kind, number, weight)

    def post(self, destination):
        self.port.post(destination)

    def mix(self, source, keep, share):
        self.keep_apart()
        return self.port.mix(source, keep, share)

    def halve(self, source, kind, number):
        self.keep_apart()
        self.port.halve(source, kind, number)

    def drop(self, source):
        self.port.drop(source)

    def scale(self, factor):
        if factor != 1:
            self.keep_apart()
            self.port.scale(factor)

    def look_ahead(self, momentum):
        if momentum != 0:
            self.keep_apart()
        self.port.look_ahead(momentum)

    def publish(self, scale):
        if self.unrecorded and self.against_model and scale == 1 and self.present:
            self.port.replace()
            self.unrecorded = False
        elif self.changed:
            self.keep_apart()
            self.port.publish(scale)
        self.changed = False

    def return_model(self, scale):
        self.keep_apart()
        if self.present:
            self.port.return_model(scale)
        else:
            self.port.keep_model(scale)
        self.unreturned = not self.present
        self.same = scale == 1 and self.present
        self.present = False

    def keep_apart(self):
        """Save what the application last got, or record its change, before X or D changes."""
        if self.unrecorded:
            self.port.record(self.against_model)
            self.unrecorded = False
        elif self.same:
            self.port.save()
        self.same = False

    # The application

    def call(self):
        """Begin the application's call with its vector, U."""
        self.take_change()
        self.present = True
        self.exchanging.call()

    def await_vector(self):
        """Note that the application calls with a vector that is still to arrive."""
        self.began = False

    def begin_awaited(self):
        """Begin that call if its vector can be used; return whether it is awaited no longer.

        It can before all of it is there, unless a pass over the whole of it is needed. A call
        whose vector will never arrive does not begin.
        """
        if not self.port.is_checked():
            return False
        whole: cython.bint = not self.port.knows_change(self.bounded) or self.port.takes_whole()
        if whole and not self.port.is_here():
            return False
        self.began = not self.port.is_lost()
        if self.began:
            self.call()
        return True

    def take_change(self):
        """Take the application's change, in place of what it last got."""
        self.changed = not self.unreturned and self.port.is_change_finite(self.same)
        if not self.changed:
            self.nonfinite += 1
        self.unrecorded = self.changed
        self.against_model = self.same
        self.same = False
        self.bounded = False

    def publish_change(self):
        """Publish the application's change outside of any call; it continues from its vector."""
        self.take_change()
        self.publish(1)
        self.port.keep()
        self.unreturned = False

    def hand_in(self):
        """Send the application's change to the rank that keeps the model, outside of any call."""
        self.take_change()
        self.exchanging.hand_in()

    def join(self):
        """Make no more calls, except those that others need; return whether an answer is due."""
        self.take_change()
        self.exchanging.join()
        return not self.exchanging.follows

    def caught_up(self):
        """Publish the change that no call for the others has included."""
        self.publish(1)

    def go_on_from(self):
        """Note that the application holds U, which is not quite what it got."""
        self.port.hold()
        self.same = False

    def returned_checked(self):
        """Note that a device checks the bounds of what the application has just got."""
        self.bounded = True

    def restart(self, calls):
        """Restart from a new model, U, which the application holds, as all ranks do."""
        self.port.load()
        self.changed = False
        self.unreturned = False
        self.same = True
        self.bounded = False
        self.epoch += 1
        self.exchanging.restart(calls)

    def interrupt(self):
        """Stop using U: what the application has requested has ended, maybe by an exception.

        A call that is not complete goes on without U.
        """
        if self.unrecorded:
            self.keep_apart()
        self.present = False
        if self.port.adopt():
            self.unreturned = True
            self.same = False

    # What drivers ask

    def counts(self, kind, epoch):
        """Return whether a message counts; a rank that leaves does not return."""
        return epoch == self.epoch or kind == LEAVE

    def takes_ahead(self):
        """Return whether to receive vectors that no action uses yet.

        While actions are pending these would only be in the way. But where some may never be used
        (`queues`), the sender would wait with blocks of its own.
        """
        return self.exchanging.queues or not self.port.is_pending()

    def takes_all(self):
        """Return whether to receive vectors behind others that wait for this rank's next call.

        It makes none for now; ranks that wait for it must learn that, and proceed.
        """
        if self.exchanging.queues:
            return True
        follows: cython.bint = self.exchanging.joined and self.exchanging.follows
        return self.exchanging.paused and not follows

    def has_answered(self):
        """Return whether what the application has requested is complete."""
        return not (self.exchanging.calling or self.port.answers())
