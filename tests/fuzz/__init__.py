"""Random scenarios of the collectives under mpiexec, and what must hold in each of them.

``python -m tests.fuzz --minutes 30`` plays some with 2 to 8 ranks in turn, and prints
the command that replays one that fails; see ``--help``. The suite plays a few (`test_fuzz`).
"""
