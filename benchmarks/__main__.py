"""Run every benchmark, each under mpiexec with the numbers of ranks that it is about."""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from common import mpiexec  # noqa: E402

RANKS = {
    "allreduce": (2, 4),
    "passive_latency": (2, 4),
    "waiting_callers": (4, 8),
    "idle": (2, 4),
    "torn": (4,),
    "straggler_training": (None,),
    "late_rules": (4, 8),
    "overlap": (4,),
}


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RANKS)} (default: all)")
    names = parser.parse_args().names or list(RANKS)
    if unknown := set(names) - set(RANKS):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(RANKS)}")
    for name in names:
        for ranks in RANKS[name]:
            print(f"\n=== {name}", flush=True)
            launcher = [*mpiexec(), "-n", str(ranks)] if ranks else []
            command = [*launcher, sys.executable, str(HERE / f"{name}.py")]
            subprocess.run(command, check=True, timeout=3600)


if __name__ == "__main__":
    main()
