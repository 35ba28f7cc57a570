"""Time and memory of simulations of many ranks.

    python benchmarks/simulation_speed.py

WAGMA-SGD with the defaults of `wagma simulate` on ranks whose steps vary, two random ones of which
are delayed; each simulation in a separate process.
"""

import json
import resource
import subprocess
import sys
import time

from common import figure, parser, report

from wagma.simulation import MACHINES, Settings, simulate, steps

# Ranks, steps, and the most seconds and GB.
CASES = ((1_024, 100, 30, None), (65_536, 20, 600, 8))


def measure(ranks, count):
    """Return the seconds, events and bytes of one simulation, this process's only work."""
    begin = time.perf_counter()
    step_times = steps.delayed(steps.log_normal(count, ranks, 0.5, 0.05, 0), "cloud", 0)
    result = simulate("wagma", step_times, MACHINES["aries"], Settings(4 * 25_559_081))
    return {
        "seconds": time.perf_counter() - begin,
        "events": result.events,
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs=2, type=int, metavar=("RANKS", "STEPS"))
    arguments = arguments.parse_args()
    if arguments.only:
        print(json.dumps(measure(*arguments.only)))
        return
    del arguments.only
    results, figures = {}, []
    for ranks, count, seconds, memory in CASES:
        name = f"{ranks:,} ranks, {count} steps"
        command = [sys.executable, __file__, "--only", str(ranks), str(count)]
        found = json.loads(subprocess.check_output(command, text=True, timeout=1200))
        results[name] = found
        print("{:24}{seconds:8.2f} s{events:12,} events{memory_gb:8.2f} GB".format(name, **found))
        figures.append(figure(f"{name}: seconds", found["seconds"], seconds))
        if memory:
            figures.append(figure(f"{name}: GB", found["memory_gb"], memory))
    report(arguments, "simulation-speed", 1, results, figures=figures)


if __name__ == "__main__":
    main()
