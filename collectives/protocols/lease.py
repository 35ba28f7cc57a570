"""A part of a rank's snapshot that counts only while the rank publishes.

The mean of the ranks' own gradients, as a part of the averaged vector, is such a sum: what a rank
has put into it is of no use to the others once that rank trains no longer. The rank tells its part.
If it then publishes nothing for `limit` versions, its engine takes the part out of its snapshot,
and puts it back before the next publication. So the sum over all ranks is that of the parts of
those that publish.

Source: our own; the term is that of distributed systems.
"""

import cython

if not cython.compiled:  # else the .pxd declares them
    from collectives.protocols.contribution import RESULT, SNAPSHOT

# Averages over all ranks, from one to the next, in which a rank may publish nothing.
PERIODS = 4


class Lease:
    """The part of one rank.

    Args:
        vectors: the rank's `Vectors`.

    Attributes:
        limit: the number of versions; 0: no part expires.
        held: whether the rank has told its part.
        expired: whether that is taken out of the snapshot.
    """

    def __init__(self, vectors):
        self.vectors = vectors
        self.limit = 0
        self.held = False
        self.expired = False

    def begin(self, sync_period):
        """Let the part expire, with so many versions from one average over all to the next."""
        self.limit = PERIODS * sync_period

    def expires(self, age):
        """Return whether the part is to be taken out, so many versions after a publication."""
        return self.limit > 0 and age >= self.limit and self.held and not self.expired

    def expire(self, keeps_base):
        """Take the part out of the snapshot.

        Args:
            keeps_base: whether the snapshot is what the application continues from, which the
                result keeps then.
        """
        if keeps_base:
            self.vectors.copy(RESULT, SNAPSHOT)
        self.vectors.take_out_part()
        self.expired = True

    def resume(self):
        """Put the part back, as the application publishes."""
        if self.expired:
            self.vectors.put_back_part()
            self.expired = False

    def renew(self):
        """Take the application's vector as its part from now on."""
        self.resume()
        self.vectors.keep_part()
        self.held = True

    def end(self):
        """Forget the part, as the application loads another vector, or makes no more calls."""
        self.held = False
        self.expired = False
