"""Protocols in Python, for tests and experiments: they run in the same drivers as compiled ones.

A driver reports an event to such a protocol with the GIL held, so its rank's engine waits for the
GIL while other threads hold it. An exception that a signal handler raises during an event, in the
main thread, leaves the event incomplete, which cannot happen in compiled protocols.
"""

import array

from collectives.protocols.formed_groups cimport Group, GroupPort, GroupProtocol


cdef class ScriptedPort:
    """A `GroupPort` that Python can call."""


    cdef GroupPort port

    def send(self, int destination, integers):
        cdef long long[::1] sent = array.array("q", integers)
        with nogil:
            self.port.send(destination, sent)

    def reduce(self, group):
        cdef Group record = Group(group.number, *group.listed())
        with nogil:
            self.port.reduce(record)

    def under_way(self, group):
        cdef Group record = Group(room=group.room)
        cdef bint found
        with nogil:
            found = self.port.under_way(record)
        if found:
            group.clear(record.number)
            for member, weight in zip(*record.listed()):
                group.add(member, weight)
        return bool(found)

    def return_model(self):
        with nogil:
            self.port.return_model()


cdef class ScriptedGroupProtocol(GroupProtocol):
    """One rank of a protocol in Python.

    Args:
        port, rank, size: see `GroupProtocol`.
        make: returns an object with the methods and attributes of a `GroupProtocol` for a
            (port, rank, size).

    Attributes:
        script: that object.
    """

    cdef readonly object script

    def __init__(self, GroupPort port, rank, size, make):
        cdef ScriptedPort wrapped = ScriptedPort()
        GroupProtocol.__init__(self, port, rank, size)
        wrapped.port = port
        self.script = make(wrapped, rank, size)
        self.passive = self.script.passive

    cdef _tell(self, str event, arguments=()):
        getattr(self.script, event)(*arguments)
        self.calls = self.script.calls
        self.calling = self.script.calling
        self.leaving = self.script.leaving
        self.due = self.script.due

    cdef void begin(self) noexcept nogil:
        with gil:
            self._tell("begin")

    cdef void passed(self, long long time) noexcept nogil:
        with gil:
            self._tell("passed", (time,))

    cdef void fell_due(self) noexcept nogil:
        with gil:
            self._tell("fell_due")

    cdef void call(self) noexcept nogil:
        with gil:
            self._tell("call")

    cdef void arrived(self, int source, long long[::1] integers) noexcept nogil:
        with gil:
            self._tell("arrived", (source, array.array("q", integers)))

    cdef void reduced(self, Group group) noexcept nogil:
        with gil:
            self._tell("reduced", (group,))

    cdef void returned(self) noexcept nogil:
        with gil:
            self._tell("returned")

    cdef void overdue(self) noexcept nogil:
        with gil:
            self._tell("overdue")

    cdef void pause(self) noexcept nogil:
        with gil:
            self._tell("pause")

    cdef void resume(self) noexcept nogil:
        with gil:
            self._tell("resume")

    cdef void restart(self, long long calls) noexcept nogil:
        with gil:
            self._tell("restart", (calls,))

    cdef void leave(self) noexcept nogil:
        with gil:
            self._tell("leave")

    cdef bint is_quiet(self) noexcept nogil:
        with gil:
            return <bint>self.script.is_quiet()

    cdef bint waits_for(self, int rank) noexcept nogil:
        with gil:
            return <bint>self.script.waits_for(rank)
