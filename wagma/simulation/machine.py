"""Machines in simulated time: LogGP, with values from the literature."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

__all__ = ["FREE", "MACHINES", "Machine"]


@dataclass(frozen=True)
class Machine:
    """A network, described by LogGP's parameters, and the nodes that it connects.

    A message of k bytes takes o + (k − 1)·G + L + o from one engine to the other, and longer if the
    sender's port or node is sending, or the receiver's receiving, another one; the network between
    them keeps what has been sent. Long exchanges of the ranks of one node share the node's
    injection limit equally. Within a node L and G may have values of their own, those of its
    memory; by default they are the network's. Nodes have consecutive ranks, `ranks_per_node` each.
    `MACHINES` maps names to machines with values from the literature; on `FREE` communication takes
    no time.

    Attributes:
        latency: L, seconds that a message travels.
        overhead: o, seconds that a message costs each of the two engines.
        gap: g, seconds from one message that an engine sends to its next one, and likewise of those
            that it receives.
        byte_gap: G, seconds per byte of one rank's long messages.
        injection: bytes per second that a node can send in all, and receive in all.
        memory: bytes per second at which a rank copies a vector, or adds one to another.
        staging: bytes per second between an accelerator and the host memory that averages are made
            in; infinite if the model is in host memory.
        response: seconds until the engine of a computing rank handles a message, also if its
            application calls meanwhile.
        ranks_per_node: ranks that share a node.
        local_latency: L of messages within a node, in seconds; None: as between nodes.
        local_byte_gap: G of messages within a node, in seconds per byte; None: as between nodes.
        node_sizes: number of ranks of each node, if they differ; a job has their sum.

    Raises:
        ValueError: a value is out of range.

    Source: Alexandrov, Ionescu, Schauser and Scheiman, LogGP, SPAA 1995.
    """

    latency: float
    overhead: float
    gap: float
    byte_gap: float
    injection: float
    memory: float = 10e9
    staging: float = math.inf
    response: float = 0.0
    ranks_per_node: int = 1
    local_latency: float | None = None
    local_byte_gap: float | None = None
    node_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.node_sizes):
            raise ValueError(f"node_sizes must be 1 or more, not {self.node_sizes}")
        for name, value in vars(self).items():
            if name == "node_sizes" or value is None:
                continue
            if name in ("injection", "memory", "staging", "ranks_per_node"):
                if not value > 0:
                    raise ValueError(f"{name} must be above 0, not {value}")
            elif not 0 <= value < math.inf:
                raise ValueError(f"{name} must be 0 or more, not {value}")
        if not float(self.ranks_per_node).is_integer():
            raise ValueError(f"ranks_per_node must be an integer, not {self.ranks_per_node}")

    def for_job(self, ranks: int, servers: int = 0) -> Machine:
        """Return the machine for a job of `ranks` ranks: no node is shared by more than these.

        Args:
            ranks: number of ranks.
            servers: number of further nodes, with a server each.

        Raises:
            ValueError: the sizes of its nodes do not add up to `ranks`.
        """
        if self.node_sizes and sum(self.node_sizes) != ranks:
            raise ValueError(
                f"node_sizes {self.node_sizes} do not add up to the number of ranks, {ranks}"
            )
        shared = min(max(self.node_sizes, default=self.ranks_per_node), ranks)
        limit = math.inf if ranks <= shared and not servers else self.injection
        return replace(self, ranks_per_node=int(shared), injection=limit)

    def node_of(self, ranks: int, servers: int = 0) -> np.ndarray:
        """Return the node of each of `ranks` ranks: int32 array of shape (ranks + servers,).

        Args:
            ranks: number of ranks.
            servers: number of servers, numbered after the ranks, each on a node of its own.
        """
        if self.node_sizes:
            nodes = np.repeat(np.arange(len(self.node_sizes)), self.node_sizes)
        else:
            nodes = np.arange(ranks) // self.ranks_per_node
        return np.append(nodes, nodes[-1] + 1 + np.arange(servers)).astype(np.intc)

    @property
    def has_two_levels(self) -> bool:
        """Whether messages within a node have times of their own."""
        return self.local_latency is not None or self.local_byte_gap is not None

    @property
    def within(self) -> tuple[float, float]:
        """L and G of messages within a node."""
        latency = self.latency if self.local_latency is None else self.local_latency
        byte_gap = self.byte_gap if self.local_byte_gap is None else self.local_byte_gap
        return latency, byte_gap

    @property
    def shared_byte_gap(self) -> float:
        """Seconds per byte of a rank's long messages while all ranks of its node send some."""
        return max(self.byte_gap, self.ranks_per_node / self.injection)


# L + 2o and G are published measurements: half the round trip, and the bandwidth, of MPI messages.
# The division of L + 2o is our choice: no measurement of o is known.
#
# aries: half round trip 1.15 to 2.2 µs, 9.6 GB/s, 1.77 million messages per second and process:
# Piz Daint's reference values in CSCS's ReFrame tests (osu_tests.py, 2016 to 2020); Pritchard, Open
# MPI issue 1005, 2015; injection: Alverson et al., Cray XC Series Network, 2012.
# hdr: 1.0 to 1.95 µs, 21.3 to 24 GB/s: Microsoft, performance of HBv2 and HBv3 machines, 2019 and
# 2021; UCX issues 8851 and 9212, 2023; gap: UCX issue 7245, 2021.
# 10gbe: TCP; 12 to 50 µs, 0.7 to 1.17 GB/s: Javed et al., Open MPI users' list, April 2014; Open
# MPI issue 7861, 2020; gap: MPICH issue 2635, 2017; injection: 1448 of a frame's 1538 bytes.
MACHINES = {
    "aries": Machine(0.9e-6, 0.35e-6, 0.6e-6, 1 / 9.6e9, injection=10.2e9),
    "hdr": Machine(0.9e-6, 0.2e-6, 0.3e-6, 1 / 23.5e9, injection=24.5e9),
    "10gbe": Machine(14e-6, 3e-6, 3.2e-6, 1 / 1.15e9, injection=1.177e9),
}

# Communication takes no time: only waiting for other ranks is left.
FREE = Machine(0, 0, 0, 0, injection=math.inf, memory=math.inf)
