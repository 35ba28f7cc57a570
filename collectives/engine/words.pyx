"""Calls and operations of all ranks, in words."""

from collectives.protocols.all_ranks cimport (
    AVERAGE,
    CLOSE,
    FINISH,
    JOIN,
    LOAD,
    MEET,
    SAVE,
    SYNC,
    SYNCHRONIZE,
)

OPERATIONS = {SYNC: "a periodic synchronization", AVERAGE: "average()",
              SYNCHRONIZE: "synchronize()", CLOSE: "close()", LOAD: "load()", JOIN: "join()",
              FINISH: "join()", MEET: "timeline()",
              SAVE: "snapshot()"}
# The purposes that several operations together may have.
PURPOSES = {OPERATIONS[what]: what for what in (AVERAGE, SYNCHRONIZE, LOAD, JOIN)}


def calls_in_words(long long count):
    """Return "1 call" or "12 calls"."""
    return f"{count} call{'' if count == 1 else 's'}"


def operation_in_words(kind, calls, detail):
    """Return what a rank has entered, after how many calls."""
    what = f"load() of version {detail}" if kind == LOAD else OPERATIONS[detail or kind]
    return f"{what} after {calls_in_words(calls)}"
