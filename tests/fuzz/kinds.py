"""The kinds of scenarios by their names."""

from . import allocations, constructions, counts, interrupts, own_pace, peers, queues
from .formed import Formed
from .groups import Groups
from .scenario import Options, play
from .triggered import Triggered

KINDS = {
    "groups": Groups,
    "own-pace": own_pace.make,
    "peers": peers.make,
    "triggered": Triggered,
    "interrupts": interrupts.make,
    "formed": Formed,
    "queues": queues.make,
    "counts": counts.make,
    "constructions": constructions.Constructions,
    "allocations": allocations.Allocations,
    "many": constructions.ManyConstructions,
}
SELDOM = ("many",)  # played once in a while, as they take long
# Seconds that a scenario may take, on a busy machine; only a hang takes so long.
LONGEST, LONGEST_OF = 180.0, {"many": 600.0}


def longest(*kinds):
    """Return the seconds that a scenario of any of these kinds may take."""
    return max(LONGEST_OF.get(kind, LONGEST) for kind in kinds)


def play_kind(kind, comm, seed, options=None, **further):
    """Play one scenario on all ranks of a communicator; raise `Failed` on all where it fails."""
    play(kind, KINDS[kind], comm, seed, options or Options(), **further)
