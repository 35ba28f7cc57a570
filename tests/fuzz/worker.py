"""What each rank of a fuzzing job runs: scenarios one after another, until one fails or time is up.

Rank 0 writes a line that begins with `PLAYING` before each, so that one which hangs or crashes is
known. One that hangs is ended, after every rank has printed where it is.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import threading
import time

from mpi4py import MPI

from .kinds import KINDS, longest, play_kind
from .scenario import Failed, Options, command

PLAYING = "playing "
PRINTING = 2.0  # seconds that the other ranks have to print, too, where they are


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, required=True)
    parser.add_argument("--seed", type=int, required=True, help="of the first scenario")
    parser.add_argument("--count", type=int, required=True, help="of seeds, at most")
    parser.add_argument("--times", type=int, required=True, help="that each is played")
    parser.add_argument("--seconds", type=float, required=True, help="after which none is begun")
    parser.add_argument("--transport")
    parser.add_argument("--engine")
    return parser.parse_args(arguments)


@contextlib.contextmanager
def bounded(what, seconds):
    """End this process, and with it the job, where the block takes too long.

    Args:
        what: list of what is to be printed then.
    """

    def end():
        print(*what, f"has not ended after {seconds:g} s", flush=True)
        faulthandler.dump_traceback()
        time.sleep(PRINTING)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    # Where a thread that hangs keeps the GIL as well.
    faulthandler.dump_traceback_later(seconds + 2 * PRINTING, exit=True)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def main(comm, arguments):
    """Return the exit status: 1 where a scenario has failed."""
    options = Options(arguments.transport, arguments.engine)
    began = time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        if comm.bcast(time.monotonic() - began) > arguments.seconds:
            break
        for kind in arguments.kinds:
            for _ in range(arguments.times):
                if comm.rank == 0:
                    print(f"{PLAYING}{kind} {seed}", flush=True)
                try:
                    told = [f"rank {comm.rank}:", command(kind, comm.size, seed, options)]
                    with bounded(told, longest(kind)):
                        play_kind(kind, comm, seed, options, begun=told.append)
                except Failed as failed:
                    if comm.rank == 0:
                        print(failed, flush=True)
                    return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(MPI.COMM_WORLD, parse()))
