"""How long ranks usually take from one event to the next: medians of their last times."""

import array

import cython

# How many of a rank's last times count.
KEPT = 5

# An unknown time, and one that never comes.
UNKNOWN = -1
NEVER = 2**62

# Others wait for a rank for PATIENCE times its usual time, and at least for LEAST nanoseconds: the
# operating system alone may delay a rank that long.
PATIENCE = 8
LEAST = 10**9
least = LEAST


def set_least(nanoseconds=LEAST):
    """Set LEAST for this process: tests run on machines that delay ranks for longer."""
    global least
    least = nanoseconds


class Paces:
    """The usual times of some ranks, in nanoseconds.

    Args:
        size: number of ranks.
    """

    def __init__(self, size):
        # The last times of each rank, as a ring, and how many were added.
        self.times = array.array("q", [0]) * (KEPT * size)
        self.added = array.array("q", [0]) * size
        self.medians = array.array("q", [UNKNOWN]) * size
        self.sorted = array.array("q", [0]) * KEPT

    def add(self, rank, time):
        """Add a rank's time to its last ones."""
        i: cython.int
        j: cython.int
        first: cython.int = KEPT * rank
        count: cython.int
        self.times[first + self.added[rank] % KEPT] = time
        self.added[rank] += 1
        count = min(self.added[rank], KEPT)
        for i in range(count):
            j = i
            while j > 0 and self.sorted[j - 1] > self.times[first + i]:
                self.sorted[j] = self.sorted[j - 1]
                j -= 1
            self.sorted[j] = self.times[first + i]
        self.medians[rank] = self.sorted[(count - 1) // 2]

    def usual(self, rank):
        """Return the median of a rank's last times, the smaller one of two; UNKNOWN without any."""
        return self.medians[rank]

    def patience(self, rank, otherwise):
        """Return how long to wait for a rank; if its usual time is unknown, it is `otherwise`."""
        usual: cython.longlong = self.medians[rank]
        if usual == UNKNOWN:
            usual = otherwise
        return max(least, PATIENCE * usual)
