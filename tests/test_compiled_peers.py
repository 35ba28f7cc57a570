"""Ranks between peers, compiled as in engines and from their source as in tests, do the same."""

from __future__ import annotations

import importlib
import itertools
import random
from collections import Counter

from compiled import built, of_python, to_python
from peer_network import neighbor_average, parameter_server, peer_rank, peers, push_sum

DECIDED = (
    *("call", "await_vector", "begin_awaited", "publish_change", "hand_in", "join", "caught_up"),
    *("go_on_from", "returned_checked", "restart", "interrupt"),
    *("counts", "takes_ahead", "takes_all", "has_answered"),
)
TOLD = "begin", "arrived", "leave", "pause", "resume", "catch_up"
COMPILED = f"""# cython: language_level=3
from collectives.protocols.peers cimport PeerProtocol
from collectives.protocols.peer_rank cimport PeerRankProtocol
{of_python(("peers", "Port"), ("peer_rank", "PeerRankPort"))}
cdef class CompiledRank:
    cdef readonly PeerRankProtocol driven
    cdef readonly PeerProtocol exchanging
    def __init__(self, port, make):
        self.driven = PeerRankProtocol(PythonPeerRankPort(port))
        self.exchanging = make(self.driven, 1, 3)
        self.driven.attach(self.exchanging)
{to_python("peer_rank", "PeerRankProtocol", "driven", *DECIDED)}
{to_python("peers", "PeerProtocol", "exchanging", *TOLD)}
"""


class SourceRank:
    """One rank of the protocols' sources, with the methods of a compiled one."""

    def __init__(self, port, make):
        self.driven = peer_rank.PeerRankProtocol(port)
        self.exchanging = make(self.driven, 1, 3)
        self.driven.attach(self.exchanging)
        for names, protocol in (DECIDED, self.driven), (TOLD, self.exchanging):
            for name in names:
                setattr(self, name, getattr(protocol, name))


class Recorder:
    """A rank's port, which notes its actions, and answers by chance."""

    def __init__(self, seed):
        self.random, self.actions = random.Random(seed), []

    def __getattr__(self, action):
        if action.startswith("__"):
            raise AttributeError(action)

        def execute(*details):
            answer = self.random.choice((0.5, 1.0) if action == "mix" else (True, False))
            self.actions.append((action, *details, answer))
            return answer

        return execute


def protocols_of(averages, pushes, server):
    """Return what makes rank 1 of 3, for each kind of protocol, of the modules of these."""
    everybody = [[0, 2]] * 2
    return (
        lambda *rank: averages.NeighborAverageProtocol(*rank, [0, 2], [0.25] * 2, 0.5, [0], False),
        lambda *rank: pushes.PushSumProtocol(*rank, everybody, everybody, 1),
        lambda *rank: server.ParameterServerProtocol(*rank, "backup", 1, 1),
        lambda *rank: server.ParameterServerProtocol(*rank, "asp", 0, 0),
        lambda *rank: server.ParameterServerProtocol(*rank, "ringmaster", 1, 0, 2),
        lambda *rank: server.ParameterServerProtocol(*rank, "async-local", 1, 0, None, 0.9, 0.5),
    )


def life(kind, seed, make, is_client):
    """Return the actions in a rank's life, whose events a seed draws, and what it becomes.

    `is_client`: whether rank 0, a server, sends it nothing but answers.
    """
    port, drawn = Recorder(seed), random.Random(seed)
    rank = kind(port, make)
    driven, exchanging = rank.driven, rank.exchanging
    rank.begin()
    for _ in range(80):
        noted = [rank.has_answered(), rank.takes_ahead(), rank.takes_all()]
        noted.append(rank.counts(drawn.choice((peers.LEAVE, 2)), drawn.randrange(3)))
        port.actions.append(noted)
        event = drawn.choice(("act", "act", "message", "message", "message", "interrupt", "all"))
        if event == "message" and not is_client:
            what = drawn.choice((peers.LEAVE, peers.AWAY, *[2] * 10))
            rank.arrived(drawn.choice((0, 2)), what, drawn.randrange(9), drawn.choice((0.5, 1.0)))
        elif event == "message" and exchanging.calling:
            rank.arrived(0, parameter_server.PULL, drawn.randrange(9), 0.0)
        elif event == "interrupt":
            rank.interrupt()
        elif event == "all":
            what = drawn.choice(("pause", "resume", "restart", "join", "caught_up", "catch_up"))
            counted = what in ("restart", "catch_up")
            getattr(rank, what)(*[exchanging.calls + drawn.randrange(2)][:counted])
        elif event == "act" and not exchanging.calling:
            calls = ("call",) * 4 + ("await_vector", "begin_awaited", "returned_checked")
            getattr(rank, drawn.choice((*calls, "publish_change", "hand_in", "go_on_from")))()
    names = (
        "present",
        "same",
        "changed",
        "unrecorded",
        "unreturned",
        "bounded",
        "began",
        "nonfinite",
    )
    return port.actions, [getattr(driven, name) for name in names], exchanging.calls


def test_a_compiled_rank_has_the_same_actions_executed_as_its_source():
    compiled = built("compiled_peer_rank", COMPILED).CompiledRank
    names = "neighbor_average", "push_sum", "parameter_server"
    modules = [importlib.import_module(f"collectives.protocols.{name}") for name in names]
    sources = protocols_of(neighbor_average, push_sum, parameter_server)
    happened = Counter()
    kinds = enumerate(zip(sources, protocols_of(*modules)))
    for (number, (source, make)), seed in itertools.product(kinds, range(75)):
        actions, *end = life(SourceRank, seed, source, number == 3)
        assert (actions, *end) == life(compiled, seed, make, number == 3), (number, seed)
        happened.update(action[0] for action in actions if isinstance(action, tuple))
    asked = {name for name in vars(peer_rank.PeerRankPort) if not name.startswith("_")}
    assert asked - set(happened) == set()
