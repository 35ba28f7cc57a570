"""One rank's averages of short vectors in shared memory, where every member comes: by slots.

Each rank has two slots, for exchanges with even numbers and for those with odd ones. It copies what
it contributes into a slot, and says so by a word. Once all members have, it averages their slots
itself, in the members' order, and says by another word that it has read them. So an exchange takes
one hand-over, where blocks that members average for each other take two, and no rank writes to
another's memory.

A slot is filled again once all members of the exchange that it was filled for have read it. They
all had filled theirs then, unless an application stands still in a call, so there is nothing that
they wait for. The numbers of a rank's exchanges increase.
"""

import cython

if not cython.compiled:  # else the .pxd declares them
    # Offsets of words, each in a cache line of its own: the exchange that a slot is filled for, of
    # the first slot and of the second, and the exchange that the rank has read; numbers plus 1.
    FILLED = 0
    READ = 32
    APART = 16
    WORDS = 48

    # Lists of members: of the exchanges that both slots were filled for last, and of this one.
    SLOTS = 2
    CURRENT = 2


class SlotsProtocol:
    """A rank's part in its own exchanges.

    Args:
        words: of each rank; compiled ones are in memory whose addresses are set.
        rank: this rank.
        members: three lists, each for as many ranks as there are; compiled ones are in memory whose
            address is set.

    Attributes:
        number: the exchange that this rank is in, or was in last; `slot`: its slot of it.
        size: its members; so many of them are known to have `filled` theirs.
        pending: whether the mean is not complete. given: whether this rank has filled its slot.
        sizes: of the lists of members of both slots.
    """

    def __init__(self, words, rank, members):
        self.port = None
        self.rank = rank
        self.number = 0
        self.slot = 0
        self.size = 0
        self.filled = 0
        self.pending = False
        self.given = False
        if not cython.compiled:
            self.words = words
            self.members = members
            self.numbers = [0] * SLOTS
            self.sizes = [0] * SLOTS
        k: cython.int
        for k in range(SLOTS):
            self.numbers[k] = 0
            self.sizes[k] = 0

    def attach(self, port):
        """Set what makes the passes."""
        self.port = port

    def place(self, k):
        """Return a list of ranks."""
        if cython.compiled:
            return self.members + k * self.most
        else:
            return self.members[k]

    def load(self, rank, offset):
        """Return a word."""
        if cython.compiled:
            return atomic_load(self.words[rank] + offset)  # noqa: F821 (of the .pxd)
        else:
            return self.words[rank][offset]

    def store(self, offset, value):
        """Set a word of this rank's, which no other changes."""
        if cython.compiled:
            atomic_store(self.words[self.rank] + offset, value)  # noqa: F821
        else:
            self.words[self.rank][offset] = value

    def begin(self, number, members, size):
        """Begin this rank's part in an exchange."""
        i: cython.int
        current: cython.p_int = self.place(CURRENT)
        for i in range(size):
            current[i] = members[i]
        self.number = number
        self.slot = number % SLOTS
        self.size = size
        self.filled = 0
        self.given = False
        self.pending = True

    def progress(self):
        """Progress without blocking; return whether the mean is complete."""
        if not self.pending:
            return True
        if not self.given:
            self.give()
        if not (self.given and self.have_all_filled()):
            return False
        self.free_other()
        self.port.average(self.slot, self.place(CURRENT), self.size)
        self.store(READ, self.number + 1)
        self.pending = False
        self.port.progressed()
        return True

    def give(self):
        """Fill this rank's slot, if it has what it contributes and the slot is free."""
        i: cython.int
        if not (self.is_read() and self.port.has_vector()):
            return
        self.port.fill(self.slot)
        current: cython.p_int = self.place(CURRENT)
        kept: cython.p_int = self.place(self.slot)
        for i in range(self.size):
            kept[i] = current[i]
        self.sizes[self.slot] = self.size
        self.numbers[self.slot] = self.number
        self.store(FILLED + self.slot * APART, self.number + 1)
        self.given = True
        self.port.progressed()

    def is_read(self):
        """Return whether all members that were to read what is in the slot have done so."""
        i: cython.int
        readers: cython.p_int = self.place(self.slot)
        for i in range(self.sizes[self.slot]):
            if self.load(readers[i], READ) <= self.numbers[self.slot]:
                return False
        self.sizes[self.slot] = 0
        return True

    def free_other(self):
        """Note that the other slot has been read, if its readers have filled theirs since.

        Where groups do not change, no rank ever looks at the words that say so.
        """
        i: cython.int
        other: cython.int = SLOTS - 1 - self.slot
        readers: cython.p_int = self.place(other)
        current: cython.p_int = self.place(CURRENT)
        if self.sizes[other] != self.size:
            return
        for i in range(self.size):
            if readers[i] != current[i]:
                return
        self.sizes[other] = 0

    def have_all_filled(self):
        """Return whether all members have filled their slots."""
        current: cython.p_int = self.place(CURRENT)
        offset: cython.Py_ssize_t = FILLED + self.slot * APART
        while self.filled < self.size:
            if self.load(current[self.filled], offset) != self.number + 1:
                return False
            self.filled += 1
        return True
