"""Jobs of `wagma train`, for several files of tests."""

import json

import launch

TIMEOUT = 100  # seconds


def train(directory, name, *flags, ranks):
    """Run the command, and return how it ended."""
    arguments = ["-m", "wagma", "train", "--runs-dir", directory, "--name", name, *flags]
    return launch.mpirun(ranks, *arguments, timeout=TIMEOUT)


def metrics(run, rank):
    """Return what a rank has recorded of each step."""
    return [json.loads(line) for line in (run / f"rank-{rank:04}.jsonl").read_text().splitlines()]
