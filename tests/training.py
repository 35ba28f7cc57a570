"""Jobs of `wagma train`, for several files of tests."""

import json

import launch

TIMEOUT = 100  # seconds
SEVERAL = """
import json, sys
from collectives.protocols import paces
from wagma import cli

paces.set_least(20 * 10**9)  # a busy machine delays ranks
for words in json.loads(sys.argv[1]):
    if status := cli.main(words):
        sys.exit(status)
"""
# Code that runs command lines in one job, whatever their exit statuses, which each rank prints.
STATUSES = """
import json, sys
from wagma import cli

print("statuses", [cli.main(words) for words in json.loads(sys.argv[1])])
"""


def train(directory, name, *flags, ranks, plots=False):
    """Run the command, and return how it ended."""
    arguments = ["-m", "wagma", "train", "--runs-dir", directory, "--name", name, *flags]
    return launch.mpirun(ranks, *arguments, timeout=TIMEOUT, plots=plots, forked=not plots)


def train_several(directory, runs, ranks, plots=False):
    """Run the command with the flags of each name, in one job: torch is loaded but once."""
    common = ["train", "--runs-dir", directory, "--name"]
    commands = [[str(word) for word in (*common, name, *runs[name])] for name in runs]
    words = "-c", SEVERAL, json.dumps(commands)
    return launch.mpirun(ranks, *words, timeout=TIMEOUT, plots=plots, forked=not plots)


def said(ended):
    """Return a job's lines, except those of reports, which depend on the machine's load."""
    return [line for line in ended.stdout.splitlines() if "(wagma report " not in line]


def metrics(run, rank):
    """Return what a rank has recorded of each step."""
    return [json.loads(line) for line in (run / f"rank-{rank:04}.jsonl").read_text().splitlines()]
