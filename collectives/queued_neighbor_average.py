"""The average with neighbors through queues of updates and tokens, for numpy vectors."""

from __future__ import annotations

import logging

from collectives import graphs
from collectives.peers import PeerCollective
from collectives.result import Result
from collectives.settings import checked_integer

__all__ = ["QueuedNeighborAverage"]

log = logging.getLogger("collectives")

MODES = ("standard", "notify-ack")
ORDERS = ("parallel", "serial")
# Iterations of a setting: updates of so many are kept.
MOST = 2**20


class QueuedNeighborAverage(PeerCollective):
    """Averages each rank's vector with its neighbors', however unequally fast these are.

    With vectors x_j in iteration k, and what rank i's application has changed of x_i since, a call
    returns x_i ← Σ_j W_ji x_j + change, W_ji = 1/n, of the n ranks that rank i has edges from and
    itself. A rank's vector is sent as soon as it is there, and those that come are queued while the
    application computes. Without more, ranks are apart by no more iterations than there are edges
    between them. With backup workers or a bounded staleness they may be further apart, up to
    `max_gap`, and a rank that is slow for good may skip iterations.

    Memory beside the vector: 2 vectors, and of each rank that this one has edges from max_gap + 1
    at most that are queued (with a staleness 1), and 1 that is being averaged, or 2 where it skips
    iterations. Where ranks have no progress thread, also those that are being sent.

    Args:
        comm, like: those of `GroupAllreduce`. Each rank's initial vector counts.
        graph: the name of a graph (`collectives.graphs.NAMES`), or a networkx graph of the ranks,
            undirected or directed, (strongly) connected; an edge goes from who sends to who
            averages. None: "ring-based". One in which not all ranks count the same is warned of.
        max_gap: the most iterations that a rank is ahead of one that it has an edge to, at least 1:
            it waits for that one's token. None: there are no tokens, which backups need.
        backup: of how many ranks a call may go without the vector, fewer than n on any rank. Those
            that are there count alike; one that comes later is dropped.
        staleness: s: a call waits only for ranks of whose vectors none is of iteration k − s or
            later. Of each the newest that has come since the last call counts its iteration −
            (k − s) + 1, this rank's own s + 1. None: all are of iteration k. With backups, which
            the paper has as "hybrid" without a rule, a call goes without so many ranks.
        max_skip: how many iterations a call may go further at a time, as the paper counts them, if
            this rank is behind all that it has edges to, whom it does not overtake; it averages
            before the one that it enters. 0 or 1: none is skipped. It needs tokens.
        skip_trigger: iterations that it must be behind by, and more, to skip any; None: 1.
        mode: "standard", or "notify-ack": a rank sends its vector once the last one has been used
            by all; without backups, staleness and skipping, and `max_gap` has no effect.
        order: "parallel": x_j is sent while the application computes what it changes of it, as
            above; "serial": a call sends x_j with the change, and returns Σ_j W_ji (x_j + change).
        engine, transport, stall, abort, log_level: those of `GroupAllreduce`.

    Attributes:
        version: number of the next call, its iteration: how many this rank has made or skipped.
        skipped: how many iterations it has skipped.
        dropped, withheld: how many vectors have come to it of no use, and how many it has not sent,
            since who would get them had gone on.

    Raises:
        TypeError, ValueError: on every rank alike, for what is wrong on any of them or differs.

    Source: Luo et al., Hop: Heterogeneity-aware Decentralized Training, ASPLOS 2019.
    """

    def __init__(
        self,
        comm,
        like,
        *,
        graph=None,
        max_gap=5,
        backup=0,
        staleness=None,
        max_skip=0,
        skip_trigger=None,
        mode="standard",
        order="parallel",
        engine=None,
        transport=None,
        stall=None,
        abort=None,
        log_level=None,
    ):
        def plan():
            from collectives.protocols import queued_neighbor_average

            edges = graphs.edges_of("ring-based" if graph is None else graph, comm.size)
            self._uneven = graphs.unevenness(edges, comm.size)
            settings = checked_settings(
                edges, comm.size, max_gap, backup, staleness, max_skip, skip_trigger, mode, order
            )
            sources = graphs.sources(edges, comm.rank)
            destinations = graphs.destinations(edges, comm.rank)
            return {"graph": sorted(edges), **settings}, (
                lambda mailbox: queued_neighbor_average.QueuedNeighborAverageProtocol(
                    mailbox, comm.rank, comm.size, sources, destinations, **settings
                )
            )

        super().__init__(
            comm,
            like,
            plan,
            engine=engine,
            transport=transport,
            stall=stall,
            abort=abort,
            log_level=log_level,
        )
        if self.rank == 0 and self._uneven:
            log.warning("graph: %s", self._uneven)

    def _result(self, version: int) -> Result:
        group = self._protocol.group()
        return Result(version, True, version, group, len(group), False)

    @property
    def skipped(self) -> int:
        return self._protocol.skipped

    @property
    def dropped(self) -> int:
        return self._protocol.dropped

    @property
    def withheld(self) -> int:
        return self._protocol.withheld


def checked_settings(
    edges, size, max_gap, backup, staleness, max_skip, skip_trigger, mode, order
) -> dict:
    """Return what the protocol is made with, by name, beside the ranks.

    Raises:
        TypeError, ValueError: one of them is wrong, or some do not go together.
    """
    for name, value, allowed in (("mode", mode, MODES), ("order", order, ORDERS)):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}, not one of {', '.join(allowed)}")
    fewest = min(map(len, graphs.neighbor_lists(edges, size)[1]))
    settings = {
        "max_gap": max_gap if max_gap is None else checked_integer("max_gap", max_gap, 1, MOST),
        "backup": checked_integer("backup", backup, 0, fewest),
        "staleness": (
            staleness if staleness is None else checked_integer("staleness", staleness, 0, MOST)
        ),
        "max_skip": checked_integer("max_skip", max_skip, 0, MOST),
        "skip_trigger": (
            1 if skip_trigger is None else checked_integer("skip_trigger", skip_trigger, 0, MOST)
        ),
        "mode": mode,
        "order": order,
    }
    if mode == "notify-ack":
        if backup or staleness is not None or max_skip:
            raise ValueError("notify-ack goes with no backup, staleness or max_skip: see the paper")
        settings["max_gap"] = None
    elif max_gap is None and (backup or max_skip):
        raise ValueError(
            f"max_gap is None, but {'backup' if backup else 'max_skip'} needs tokens: without them "
            "ranks could be apart by any number of iterations"
        )
    return settings
