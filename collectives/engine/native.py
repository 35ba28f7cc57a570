"""The Python interface of the native engine; importing it initializes MPI."""

from collectives.engine.formed_groups import FormedGroups
from collectives.engine.guard import Guard
from collectives.engine.mailbox import Mailbox
from collectives.engine.peers import PeerExchange
from collectives.engine.progress import engine
from collectives.engine.triggered_averages import TriggeredAverages
from collectives.engine.versions import GroupVersions

__all__ = [
    "FormedGroups",
    "GroupVersions",
    "Guard",
    "Mailbox",
    "PeerExchange",
    "TriggeredAverages",
    "engine",
]
