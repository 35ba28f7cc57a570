"""Jobs of `wagma train`, for several files of tests."""

import json

import launch

TIMEOUT = 100  # seconds
SEVERAL = """
import json, sys
from wagma import cli

for words in json.loads(sys.argv[1]):
    if status := cli.main(words):
        sys.exit(status)
"""


def train(directory, name, *flags, ranks):
    """Run the command, and return how it ended."""
    arguments = ["-m", "wagma", "train", "--runs-dir", directory, "--name", name, *flags]
    return launch.mpirun(ranks, *arguments, timeout=TIMEOUT)


def train_several(directory, runs, ranks):
    """Run the command with the flags of each name, in one job: torch is loaded but once."""
    common = ["train", "--runs-dir", directory, "--name"]
    commands = [[str(word) for word in (*common, name, *runs[name])] for name in runs]
    return launch.mpirun(ranks, "-c", SEVERAL, json.dumps(commands), timeout=TIMEOUT)


def said(ended):
    """Return a job's lines, except those of reports, which depend on the machine's load."""
    return [line for line in ended.stdout.splitlines() if "(wagma report " not in line]


def metrics(run, rank):
    """Return what a rank has recorded of each step."""
    return [json.loads(line) for line in (run / f"rank-{rank:04}.jsonl").read_text().splitlines()]
