"""WAGMA at its own pace: versions that all ranks execute, apart from the calls of any of them.

Versions are numbered by the job, calls by a rank, and ranks make any number of calls. A call adds
the rank's change to its snapshot. If no version has been executed or started since the rank's last
call, it starts the next one and waits for its exchange; else others have averaged since, and it
returns its snapshot at once. Every `sync_period`-th version averages over all ranks: as any other,
it averages their snapshots, whatever their applications do. So no rank waits for the application of
another.

With the conserving rule the sum of all snapshots changes by the published changes only.

Source: our own; versions and activation are those of WAGMA-SGD.
"""

import cython

from collectives.protocols.wait_avoiding import WaitAvoidingProtocol

if not cython.compiled:  # else the .pxd declares it
    from collectives.protocols.wait_avoiding import RUNNING


class OwnPaceProtocol(WaitAvoidingProtocol):
    """One rank at its own pace: `version` is the next version at the time of its last call."""

    def __init__(self, dimensions, group_size, sync_period, passive):
        WaitAvoidingProtocol.__init__(self, dimensions, group_size, sync_period, passive)
        # Versions over all ranks connect groups of one member.
        self.exchanges = dimensions > 0
        self.own_pace = True

    def is_synchronous(self):
        return False

    def publishes_for(self):
        return self.next

    def returned(self):
        return self.source

    def returns(self):
        self.version = self.next
        self.completed()
        self.release()

    def abandon(self):
        """Abandon the application's interrupted call; a version that it has started goes on."""
        self.waiting = False
        self.version += self.timely
        if self.vectors != RUNNING:
            self.release()

    def agreed(self, records, size, differ=False):
        """Handle the agreement: all ranks first execute every version that any has started.

        No rank's `version` is higher than the last one started plus 1, and the rank that has
        started it completed its call before it entered.
        """
        r: cython.int
        last: cython.longlong = 0
        for r in range(size):
            if records[2 * r + 1] > last:
                last = records[2 * r + 1]
        for r in range(size):
            records[2 * r + 1] = last
        WaitAvoidingProtocol.agreed(self, records, size, differ)
