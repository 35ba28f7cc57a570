"""Play random scenarios of the collectives for some minutes; print how to replay those that fail.

Jobs of 2, 3, 4, 5 and 8 ranks take turns. What ranks do follows from the seed, when they do it does
not: a failure that depends on the timing may need `--times 100` to be seen again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from launch import Job, mpiexec, print_stacks, text

from .kinds import KINDS
from .scenario import Options, command
from .worker import LONGEST, PLAYING, PRINTING

ROOT = Path(__file__).parents[2]
RANKS = (2, 3, 4, 5, 8)
TURN = 30.0  # seconds that one job plays
STARTING = 60.0  # seconds that a job may take to start and to end
MANY = 10**6


def parse():
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="10 by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="instead of these")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="only these")
    parser.add_argument("--from", type=int, dest="first", help="first seed, else from the clock")
    parser.add_argument("--seed", type=int, help="play this one alone, with each number of ranks")
    parser.add_argument("--times", type=int, default=1, help="that each seed is played")
    parser.add_argument("--transport", choices=("messages", "shared"), help="of all collectives")
    parser.add_argument("--engine", choices=("adaptive", "dedicated", "none"), help="of all")
    parser.add_argument("--keep-going", action="store_true", help="after one that fails")
    return parser.parse_args()


def turns(arguments):
    """Yield (ranks, first seed or None to go on, number of seeds, seconds) of one job at a time."""
    if arguments.seed is not None:
        for ranks in arguments.ranks:
            yield ranks, arguments.seed, 1, LONGEST * arguments.times
        return
    end = time.monotonic() + 60 * arguments.minutes
    for ranks in itertools.cycle(arguments.ranks):
        left = end - time.monotonic()
        if left <= 0:
            return
        yield ranks, None, MANY, min(TURN, left)


def worker_command(ranks, arguments, seed, count, seconds):
    given = {"transport": arguments.transport, "engine": arguments.engine}
    words = [
        *("--kinds", *arguments.kind, "--seed", seed, "--count", count),
        *("--times", arguments.times, "--seconds", seconds),
        *itertools.chain(*((f"--{name}", value) for name, value in given.items() if value)),
    ]
    program = [sys.executable, "-m", "tests.fuzz.worker", *map(str, words)]
    return [*mpiexec(), "-n", str(ranks), *program]


def run(command, seconds):
    """Run a job for no more than so long; return whether it was good, and what it wrote."""
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    deadline = time.monotonic() + seconds
    with (
        tempfile.TemporaryFile() as output,
        Job(command, env=env, cwd=ROOT, stdout=output, stderr=output) as job,
    ):
        while job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if job.poll() is None:
            print_stacks(job)
        good = job.poll() == 0
        left = job.left_behind() if good else []
        return good and not left, text(output) + "".join(f"left behind: {one}\n" for one in left)


def main():
    """Return the exit status: 1 where any scenario has failed."""
    # A terminated run still ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = parse()
    options = Options(arguments.transport, arguments.engine)
    next_seed = int(time.time()) if arguments.first is None else arguments.first
    failed, total = [], 0
    for ranks, seed, count, seconds in turns(arguments):
        seed = next_seed if seed is None else seed
        good, written = run(
            worker_command(ranks, arguments, seed, count, seconds),
            seconds + LONGEST + 3 * PRINTING + STARTING,
        )
        lines = written.splitlines()
        played = [line.removeprefix(PLAYING) for line in lines if line.startswith(PLAYING)]
        kind, last = (played or [f"{arguments.kind[0]} {seed}"])[-1].split()
        print(f"{ranks} ranks: {len(played)} scenarios, seeds {seed} to {last}", flush=True)
        total, next_seed = total + len(played), int(last) + 1
        if not good:
            failed.append(command(kind, ranks, last, options))
            said = [line for line in lines if not line.startswith(PLAYING)]
            print(*said, f"replay: {failed[-1]}", "", sep="\n", flush=True)
            if not arguments.keep_going:
                break
    print(f"{total} scenarios, {len(failed)} failed", *failed, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
