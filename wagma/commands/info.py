"""``wagma info``: the environment of a job."""

from __future__ import annotations

import argparse

from wagma import job, logs
from wagma.commands.options import add_log_level
from wagma.parsing import EXIT_STATUSES

INFO_EXAMPLES = """\
examples:
  wagma info
  mpiexec -n 4 wagma info
  srun --mpi=pmi2 -N 2 -n 8 wagma info
"""


def add(commands) -> None:
    """Add the command ``info``."""
    parser = commands.add_parser(
        "info",
        help="show the MPI, nodes, engine and versions that a job runs with",
        description="Show the environment of a job that is started in the same way: the MPI "
        "library, its thread level, the ranks on each node, the engine's mode, whether MPI is "
        "CUDA-aware, and versions.",
        epilog=f"{INFO_EXAMPLES}\n{EXIT_STATUSES}",
    )
    parser.set_defaults(parser=parser, command=run, check=lambda settings: [], run=job.run)
    add_log_level(parser)


def run(settings: argparse.Namespace, comm, signals: job.Signals) -> int:
    """Print the job's environment."""
    from wagma.info import info

    logs.start(settings.log_level, comm.rank)
    info(comm)
    return job.OK
