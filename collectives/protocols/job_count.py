"""The count of what all ranks have done together, which travels with their vectors.

A rank adds the work of a call when it publishes its change, and every exchange averages the counts
of its members, as it averages their snapshots. So the sum of all counts is the work published, and
an average over all ranks tells each of them the same mean, by no other message.
"""


class JobCount:
    """One rank's count, at the ranks' own pace.

    Attributes:
        unpublished: the work of calls whose change is not yet published.
        count: this rank's share of the work that all ranks have published.
        known: the mean of all ranks' counts in the newest average over all ranks.
        told: what was known at the end of the application's last call or operation: other ranks'
            calls change `known` meanwhile, but not what a rank reads beside its own result.
    """

    def __init__(self):
        self.unpublished = 0
        self.count = 0
        self.known = 0
        self.told = 0

    def work(self, amount):
        """Note the work of a call."""
        self.unpublished += amount

    def publish(self, counts):
        """Add it, now that its change is published; it `counts` unless that was not finite."""
        if counts:
            self.count += self.unpublished
        self.unpublished = 0

    def average(self, mean):
        """Take the mean of the counts of an exchange's members."""
        self.count = mean

    def learn(self, mean):
        """Note the mean of the counts of all ranks, in an average over all of them."""
        self.known = mean

    def tell(self):
        """Tell the application what is known, at the end of its call or operation."""
        self.told = self.known

    def restart(self, count):
        """Continue with this count, which all ranks have."""
        self.unpublished = 0
        self.count = count
        self.known = count
