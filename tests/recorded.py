"""Runs of `wagma train`, as they are on disk, without training."""

import json
import os
import time


def record(step, own=0.1, waited=0.02, **fields):
    """Return the record of a step, with which a rank has made `step` steps like it before."""
    return {
        "step": step,
        "loss": 2.0 - 0.01 * step,
        "samples": 32,
        "compute_s": own,
        "delay_s": 0.0,
        "average_s": waited,
        "waiting_s": waited,
        "elapsed_s": (step + 1) * (own + waited),
        "timely": True,
        "synchronized": False,
    } | fields


def write(run, ranks, steps=40, total=80, **settings):
    """Write a run that goes on; `ranks` has each rank's seconds of a step."""
    run.mkdir()
    made = {"steps": total, "seconds": None, "algorithm": "wagma", "ranks": len(ranks)} | settings
    (run / "config.json").write_text(json.dumps(made))
    for rank, own in enumerate(ranks):
        append(run, rank, [record(step, own, 0.25 - own) for step in range(steps)])
    return run


def append(run, rank, records):
    """Let a rank write."""
    with (run / f"rank-{rank:04}.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in records)


def age(path, seconds):
    """Let a file have been written this long ago."""
    then = time.time() - seconds
    os.utime(path, (then, then))
