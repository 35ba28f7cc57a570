"""Which arrays take part in which versions, and of which ranks tell parts that expire."""

from __future__ import annotations


class Periods:
    """Of each array the versions from one that averages it to the next.

    Args:
        chance: `random.Random` that all ranks have alike, for nothing else: so a seed's plan is the
            same with and without.
        count: number of arrays.
        may_leave_out: whether a version may average some of them only.

    Attributes:
        of: that number for each array; 0: only averages over all ranks average it.
    """

    def __init__(self, chance, count, may_leave_out=True):
        leaves_out = chance.random() < 0.6 and may_leave_out
        self.of = [1]
        while len(self.of) < count:
            # An array takes part whenever a later one does.
            self.of.append(self.of[-1] * (chance.choice((0, 1, 1, 2, 3)) if leaves_out else 1))

    @property
    def settings(self):
        """Return the options of the collective that say so."""
        periods = list(enumerate(self.of))
        every = {index: period for index, period in periods if period > 1}
        only = [index for index, period in periods if period == 0]
        return {"every": every, "only_all_ranks": only}

    def left_out(self, versions):
        """Return the indices of the arrays that none of these versions of groups averages."""
        return [
            index
            for index, period in enumerate(self.of)
            if period == 0 or all((version + 1) % period for version in versions)
        ]


def draw_leased(chance, count):
    """Return indices of arrays in a row, of which ranks tell their parts, or none."""
    if chance.random() < 0.5:
        return []
    begin = chance.randrange(count)
    return list(range(begin, chance.randint(begin + 1, count)))
