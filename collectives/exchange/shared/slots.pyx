"""Averages of short vectors in shared memory, for which every member comes, by slots.

When slots are filled and averaged is decided in `protocols.slots`; here are the copies and means.
"""

from libc.stdlib cimport free

from collectives.exchange.clock cimport now
from collectives.memory.allocation cimport zeroed
from collectives.memory.layout cimport HEADER
from collectives.protocols.slots cimport APART, CURRENT, FILLED, READ, SlotsProtocol

cdef enum:
    # The longest vectors, in bytes as they are laid out. Longer ones are faster by blocks, of which
    # each member averages its share only.
    LONGEST = 16384 + HEADER

cdef Py_ssize_t longest_of_two = LONGEST
cdef Py_ssize_t longest_of_more = LONGEST


def set_longest(Py_ssize_t of_two=LONGEST, Py_ssize_t of_more=LONGEST):
    """Set the longest vectors of two members, and of more, in collectives made from now on.

    For tests. −1: there are none.
    """
    global longest_of_two, longest_of_more
    longest_of_two, longest_of_more = of_two, of_more


cdef bint has_slots(Py_ssize_t length) noexcept:
    """Return whether vectors of so many bytes are averaged by slots in groups of any size."""
    return length <= max(longest_of_two, longest_of_more)


cdef class SlotVectors(SlotsPort):
    """This rank's slots, and the other vectors of its exchanges.

    Args:
        memory: that of this rank.
        rank, size: this rank, and number of ranks.
    """

    def __init__(self, Reduction reduction, SharedMemory memory, int rank, int size):
        self.reduction, self.layout = reduction, reduction.layout
        self.memory, self.part, self.rank = memory, memory.parts[rank], rank
        self.shares = <double *>zeroed(size, sizeof(double))
        self.vectors = <char **>zeroed(size, sizeof(char *))
        if self.shares == NULL or self.vectors == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.shares)
        free(self.vectors)

    cdef Given *given(self, int rank, int slot) noexcept nogil:
        return <Given *>(self.memory.slot_words[rank] + FILLED + slot * APART)

    cdef bint has_vector(self) noexcept nogil:
        return self.user == NULL or self.reduction.arrival.has(self.user, self.layout.size)

    cdef void fill(self, int slot) noexcept nogil:
        cdef Given *given = self.given(self.rank, slot)
        cdef int i
        self.keep()
        given.weight, given.count = self.part.weight, self.part.count
        if given.weight == 0:
            return  # nobody reads the vector
        for i in range(self.averaged):
            self.layout.space.copy(
                self.memory.slot(self.rank, slot) + self.layout.begin[i],
                self.user[i] if self.lent
                else self.memory.snapshot(self.rank) + self.layout.begin[i],
                self.layout.bytes[i])

    cdef void keep(self) noexcept nogil:
        """Copy what the application lends to the snapshot, if this rank's vectors are used."""
        cdef int i
        if self.lent and not self.ringed:
            for i in range(self.layout.count):
                self.layout.space.copy(
                    self.memory.snapshot(self.rank) + self.layout.begin[i], self.user[i],
                    self.layout.bytes[i])

    cdef void average(self, int slot, const int *members, int size) noexcept nogil:
        cdef long long began = now()
        cdef double total = self._weigh(slot, members, size)
        cdef int i
        self.part.total = self.reduction.weight = total
        if total > 0:
            for i in range(self.layout.count):
                if self.part.saves:
                    self.layout.space.copy(
                        self.memory.result(self.rank) + self.layout.begin[i],
                        self.memory.snapshot(self.rank) + self.layout.begin[i],
                        self.layout.bytes[i])
                if i < self.averaged:
                    self._average_array(i, slot, members, size)
                else:
                    self._keep_array(i)
            if self.part.in_place:
                self.part.weight = self.part.weight_after
                self.part.replaced = True
                self.part.saves = False
            if self.user != NULL:
                self.reduction.arrival.give_back(self.user, self.layout.size)
        self.reduction.in_slots += 1
        self.reduction.worked(began)

    cdef double _weigh(self, int slot, const int *members, int size) noexcept nogil:
        """Compute each member's share of the mean, and the mean count; return the total weight."""
        cdef double total = 0, count = 0
        cdef int k
        for k in range(size):
            self.shares[k] = self.given(members[k], slot).weight
            total += self.shares[k]
            count += self.given(members[k], slot).count
        for k in range(size):
            if total > 0:
                self.shares[k] /= total
        self.part.count = self.reduction.count = count / size
        return total

    cdef void _average_array(
        self, int i, int slot, const int *members, int size
    ) noexcept nogil:
        """Write the mean of an array to the application's, and to this rank's own vector."""
        cdef char *targets[2]
        cdef int k, takers = 0
        for k in range(size):
            self.vectors[k] = self.memory.slot(members[k], slot) + self.layout.begin[i]
        if self.user != NULL:
            targets[0] = self.user[i]
            takers = 1
        if not self.ringed and (self.part.in_place or self.user == NULL):
            targets[takers] = self.layout.begin[i] + (
                self.memory.snapshot(self.rank) if self.part.in_place
                else self.memory.result(self.rank))
            takers += 1
        if takers > 0:
            self.layout.space.mean(
                i, targets, takers, <const char **>self.vectors, self.shares, size,
                self.layout.length[i])

    cdef void _keep_array(self, int i) noexcept nogil:
        """Let this rank have its own of an array that is not averaged."""
        cdef char *own = self.memory.snapshot(self.rank) + self.layout.begin[i]
        if self.ringed or self.lent:
            return
        if self.user == NULL:
            if not self.part.in_place:
                self.layout.space.copy(
                    self.memory.result(self.rank) + self.layout.begin[i], own,
                    self.layout.bytes[i])
        elif self.part.filled:  # else it contributes 0, in place of what it keeps
            self.layout.space.copy(self.user[i], own, self.layout.bytes[i])

    cdef void progressed(self) noexcept nogil:
        self.reduction.progress_count += 1


cdef class Slots(Transport):
    """This rank's part in its exchanges of short vectors.

    Args:
        memory, rank, size: see `SlotVectors`.
    """

    def __init__(self, Reduction reduction, SharedMemory memory, int rank, int size):
        self.longest_of_two, self.longest = longest_of_two, longest_of_more
        self.vectors = SlotVectors(reduction, memory, rank, size)
        self.steps = SlotsProtocol(None, rank, None)
        self.members = <int *>zeroed((CURRENT + 1) * size, sizeof(int))
        if self.members == NULL:
            raise MemoryError
        self.steps.words, self.steps.members = memory.slot_words, self.members
        self.steps.most = size
        self.steps.attach(self.vectors)

    def __dealloc__(self):
        free(self.members)

    cdef bint suit(self, int size) noexcept nogil:
        """Return whether so many members average their vectors by slots."""
        return self.vectors.layout.size <= (self.longest_of_two if size <= 2 else self.longest)

    cdef void begin(
        self, long long number, const int *members, int size, char **user, bint lent, bint ringed,
        int averaged
    ) noexcept nogil:
        """Begin this rank's part in an exchange; see `Shared.begin`.

        Args:
            averaged: how many arrays are averaged, from the first on; of others each member keeps
                its own.
        """
        self.vectors.user = user
        self.vectors.lent = lent
        self.vectors.ringed = ringed
        self.vectors.averaged = averaged
        self.steps.begin(number, members, size)

    cdef bint progress(self) noexcept nogil:
        return self.steps.progress()

    cdef set readers(self):
        """Return the ranks that have yet to read the slot that this one is to fill, if it waits."""
        cdef int slot = self.steps.slot
        cdef int i
        found = set()
        if self.steps.pending and not self.steps.given:
            for i in range(self.steps.sizes[slot]):
                rank = self.steps.place(slot)[i]
                if self.steps.load(rank, READ) <= self.steps.numbers[slot]:
                    found.add(rank)
        return found

    cdef void adopt(self, char **kept) noexcept nogil:
        """Keep what the slot has not yet received, and return nothing to the application's arrays.

        Where this rank's vectors are not used, the arrays `kept` take their place.
        """
        if self.vectors.ringed and self.vectors.lent:
            if kept != NULL and kept != self.vectors.user:
                self.vectors.layout.copy(kept, self.vectors.user)
                self.vectors.user = kept
            return
        if not self.steps.given:
            self.vectors.keep()
        self.vectors.lent = False
        self.vectors.user = NULL

    cdef bint uses(self, char **user) noexcept nogil:
        """Return whether a pending exchange still changes this rank's result, the kept copy."""
        return self.vectors.part.saves and self.steps.pending
