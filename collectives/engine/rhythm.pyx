"""When the idle engine polls for work: often around the time at which the next version is due."""

cdef enum:
    SHORTEST_PAUSE = 10000
    FAST = 1000000
    PAUSE_WHEN_FAST = 100000
    LONGEST_PAUSE_WITHIN_RHYTHM = 500000


cdef class Rhythm:
    """When to poll for the next version, computed from the times of the last ones.

    The idle engine polls rarely before the next version is due, often around that time, and then
    less and less often until one arrives. Versions in quick succession are mostly driven by this
    rank's own calls, which frequent polls would disturb.
    """
    cdef void beat(self, long long time) noexcept nogil:
        """Note that a version began at this time."""
        cdef double interval = time - self.last
        cdef double error = interval - self.interval
        if self.last == 0:
            self.last = time
            return
        self.last = time
        if self.interval == 0 or interval > 8 * self.interval or 8 * interval < self.interval:
            self.interval = interval
            self.deviation = interval / 2
            return
        self.interval += error / 8
        self.deviation += ((error if error > 0 else -error) - self.deviation) / 4

    cdef long long pause(self, long long time) noexcept nogil:
        """Return for how many nanoseconds the idle engine may sleep at this time."""
        cdef double since = time - self.last
        cdef double guard = 2 * self.deviation + 50e3
        cdef double early = self.interval - guard - since
        cdef double shortest = PAUSE_WHEN_FAST if self.interval < FAST else SHORTEST_PAUSE
        if early > 0:
            return <long long>min(early + 1e3, LONGEST_PAUSE_WITHIN_RHYTHM)
        if since < self.interval + guard:
            # The less regular the rhythm is, the longer this phase lasts: poll less often.
            return <long long>min(max(guard / 64, shortest), LONGEST_PAUSE)
        return <long long>min(max((since - self.interval) / 8, shortest), LONGEST_PAUSE)
