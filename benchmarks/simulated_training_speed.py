"""Time and memory of trainings in simulated time.

    python benchmarks/simulated_training_speed.py

WAGMA-SGD and Allreduce-SGD on log-normal steps, evaluated twenty times: the digits' network on 8
and 64 ranks, a multilayer perceptron on 256; with gradients computed at once and, for 8 ranks, one
by one. Each training in a separate process, after one of a few steps in which torch imports and
initializes what it needs (`first`, in seconds). Memory is counted above that of the process after
its imports; its bound is that of the vectors, and 300 MB.
"""

import json
import resource
import subprocess
import sys
import time

from common import figure, parser, report
from torch import nn

from wagma import simulation
from wagma.simulated_training import Alone
from wagma.simulation import MACHINES, steps
from wagma.simulation.memory import BASE
from wagma.tasks import digits

# Ranks, steps, network, whether gradients are computed at once, and the most seconds.
CASES = (
    (8, 400, "cnn", True, 3),
    (8, 400, "cnn", False, None),
    (64, 400, "cnn", True, 30),
    (256, 100, "mlp", True, 60),
)
METHODS = ("wagma", "allreduce")
VECTORS = {"wagma": 6, "allreduce": 6}  # model, gradient, momentum, and the collective's


def perceptron():
    """Return a network for 8 × 8 images and ten classes, with 2,410 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def used():
    """Return the bytes of this process's memory, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def timed(task, method, ranks, count, at_once):
    """Return the seconds that a training takes, and its results."""
    step_times = steps.log_normal(count, ranks, 0.5, 0.05, 0)
    every = max(1, count // 20)
    begin = time.perf_counter()
    learned = simulation.train(
        task, method, step_times, MACHINES["aries"], batched=at_once, evaluate_every=every
    )
    return time.perf_counter() - begin, learned


def measure(method, ranks, count, network, at_once):
    """Return the seconds and bytes of one training, this process's only work."""
    task = digits.task("iid", Alone())
    if network == "mlp":
        task = task._replace(model=perceptron)
    before = used()
    first, _ = timed(task, method, 2, 2, at_once)
    seconds, learned = timed(task, method, ranks, count, at_once)
    model = sum(value.numel() * value.itemsize for value in task.model().parameters())
    return {
        "first": first,
        "seconds": seconds,
        "memory_mb": (used() - before) / 1e6,
        "vectors_mb": ranks * VECTORS[method] * model / 1e6,
        "accuracy": learned.summary["accuracy"],
    }


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs=5, metavar=("METHOD", "RANKS", "STEPS", "NET", "ONCE"))
    arguments = arguments.parse_args()
    if arguments.only:
        method, ranks, count, network, at_once = arguments.only
        print(json.dumps(measure(method, int(ranks), int(count), network, at_once == "True")))
        return
    del arguments.only
    results, figures = {}, []
    for ranks, count, network, at_once, seconds in CASES:
        for method in METHODS:
            how = "at once" if at_once else "one by one"
            name = f"{method}, {ranks} ranks × {count} steps of the {network}, {how}"
            command = [sys.executable, __file__, "--only", method, ranks, count, network, at_once]
            found = json.loads(
                subprocess.check_output(list(map(str, command)), text=True, timeout=1200)
            )
            results[name] = found
            line = "{:52}{seconds:8.2f} s{memory_mb:9.1f} MB, vectors {vectors_mb:.1f} MB"
            print(line.format(name, **found), flush=True)
            if seconds:
                figures.append(figure(f"{name}: seconds", found["seconds"], seconds))
                bound = found["vectors_mb"] + BASE / 1e6
                figures.append(figure(f"{name}: MB", found["memory_mb"], bound))
    report(arguments, "simulated-training-speed", 1, results, figures=figures)


if __name__ == "__main__":
    main()
