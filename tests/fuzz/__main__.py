"""Play random scenarios of the collectives for some minutes; print how to replay those that fail.

Jobs of 2 to 8 ranks take turns. In some of them a process is stopped for a while, and then one is
killed. What ranks do follows from the seed, when they do it does not: a failure that depends on the
timing may need `--times 100` to be seen again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from launch import Job, mpiexec, print_stacks, text

from .kinds import KINDS, SELDOM, longest
from .scenario import Options, command
from .worker import PLAYING, PRINTING

ROOT = Path(__file__).parents[2]
RANKS = (4, 2, 5, 3, 8, 6, 7)
TURN = 30.0  # seconds that one job plays
STARTING = 60.0  # seconds that a job may take to start and to end
SELDOM_EVERY = 10  # turns
KILLED = 20.0  # seconds in which a job ends of which a process was killed
MANY = 10**6


def parse():
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="10 by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="instead of these")
    parser.add_argument("--kind", nargs="+", choices=KINDS, help="only these")
    parser.add_argument("--from", type=int, dest="first", help="first seed, else from the clock")
    parser.add_argument("--seed", type=int, help="play this one alone, with each number of ranks")
    parser.add_argument("--times", type=int, default=1, help="that each seed is played")
    parser.add_argument("--transport", choices=("messages", "shared"), help="of all collectives")
    parser.add_argument("--engine", choices=("adaptive", "dedicated", "none"), help="of all")
    parser.add_argument("--keep-going", action="store_true", help="after one that fails")
    return parser.parse_args()


class Turn(NamedTuple):
    """One job.

    Attributes:
        ranks: their number.
        kinds: names of what is played.
        seed: the first; None: go on.
        count: number of seeds.
        seconds: after which nothing is begun.
        is_killed: whether processes are stopped meanwhile, and one is killed in the end.
    """

    ranks: int
    kinds: list[str]
    seed: int | None
    count: int
    seconds: float
    is_killed: bool = False


def turns(arguments):
    """Yield one `Turn` at a time."""
    usual = arguments.kind or [kind for kind in KINDS if kind not in SELDOM]
    if arguments.seed is not None:
        for ranks in arguments.ranks:
            yield Turn(ranks, usual, arguments.seed, 1, longest(*usual) * arguments.times)
        return
    end = time.monotonic() + 60 * arguments.minutes
    for number, ranks in enumerate(itertools.cycle(arguments.ranks)):
        left = end - time.monotonic()
        if left <= 0:
            return
        which = number % SELDOM_EVERY
        if which == SELDOM_EVERY - 1 and not arguments.kind:
            yield Turn(ranks, list(SELDOM), None, 1, left)
        elif which == SELDOM_EVERY // 2:
            yield Turn(ranks, usual, None, MANY, TURN, is_killed=True)
        else:
            yield Turn(ranks, usual, None, MANY, min(TURN, left))


def worker_command(turn, arguments, seed):
    given = {"transport": arguments.transport, "engine": arguments.engine}
    ranks, kinds, _, count, seconds, _ = turn
    words = [
        *("--kinds", *kinds, "--seed", seed, "--count", count),
        *("--times", arguments.times, "--seconds", seconds),
        *itertools.chain(*((f"--{name}", value) for name, value in given.items() if value)),
    ]
    program = [sys.executable, "-m", "tests.fuzz.worker", *map(str, words)]
    return [*mpiexec(), "-n", str(ranks), *program]


def wait_for(job, deadline):
    """Wait until a job has ended, or time is up."""
    while job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def stop_and_kill(job):
    """Stop processes of a job for a while, then kill one; return whether the job has ended so.

    Another process may be stopped while one is killed.
    """
    chance = random.Random()

    def wait(most):
        wait_for(job, time.monotonic() + chance.random() * most)

    wait(8)
    for _ in range(chance.randrange(4)):
        rank = chance.choice([*job.ranks()] or [None])
        if rank is None or job.poll() is not None:
            break
        job.send(signal.SIGSTOP, rank)
        wait(1.5)
        job.send(signal.SIGCONT, rank)
        wait(1)
    ranks = [*job.ranks()]
    if job.poll() is not None or not ranks:
        return False
    if chance.random() < 0.5:
        job.send(signal.SIGSTOP, chance.choice(ranks))
    job.send(signal.SIGKILL, chance.choice(ranks))
    wait_for(job, time.monotonic() + KILLED)
    return job.poll() not in (None, 0)


def run(command, seconds, is_killed):
    """Run a job for no more than so long; return whether it was good, and what it wrote."""
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    deadline = time.monotonic() + seconds
    with (
        tempfile.TemporaryFile() as output,
        Job(command, env=env, cwd=ROOT, stdout=output, stderr=output) as job,
    ):
        if is_killed:
            good = stop_and_kill(job)
        else:
            wait_for(job, deadline)
            good = job.poll() == 0
        if job.poll() is None:
            print_stacks(job)
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
    for turn in turns(arguments):
        ranks, kinds = turn.ranks, turn.kinds
        seed = next_seed if turn.seed is None else turn.seed
        good, written = run(
            worker_command(turn, arguments, seed),
            turn.seconds + longest(*kinds) + 3 * PRINTING + STARTING,
            turn.is_killed,
        )
        lines = written.splitlines()
        played = [line.removeprefix(PLAYING) for line in lines if line.startswith(PLAYING)]
        kind, last = (played or [f"{kinds[0]} {seed}"])[-1].split()
        how = ", stopped and killed" if turn.is_killed else ""
        print(f"{ranks} ranks: {len(played)} scenarios, seeds {seed} to {last}{how}", flush=True)
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
