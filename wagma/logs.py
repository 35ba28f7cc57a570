"""Where log messages go: rank 0's to the terminal, every rank's to a file of its run.

The messages are those of the loggers "wagma" and "collectives", and warnings and errors of any
other, Python's own warnings included. A rank other than 0 never writes to the terminal, and what
it says is not lost: files have every rank's messages from "info" on, whatever the terminal shows.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

LEVELS = ("debug", "info", "warning", "error")
DEFAULT_LEVEL = "warning"
VARIABLE = "WAGMA_LOG_LEVEL"
LOGGERS = ("wagma", "collectives")
FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Terminal(logging.Handler):
    """Writes "wagma: warning: …" to what is standard error now: a progress bar replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        text = f"{record.name}: {record.levelname.lower()}: {self.format(record)}"
        print(text, file=sys.stderr, flush=True)


def start(level: str, rank: int) -> None:
    """Let rank 0's messages from ``level`` on appear on standard error.

    Args:
        level: One of `LEVELS`.
        rank: This process's.
    """
    number = getattr(logging, level.upper())
    root = logging.getLogger()
    if rank == 0:
        terminal = Terminal(number)
        root.addHandler(terminal)
    else:
        root.addHandler(logging.NullHandler())  # without any, logging would write warnings itself
    for name in LOGGERS:
        logging.getLogger(name).setLevel(min(number, logging.INFO))
    os.environ.pop(VARIABLE, None)  # a collective would set its logger's level to it
    logging.captureWarnings(True)


def to_file(run: Path, rank: int) -> None:
    """Write this rank's messages to the run's ``rank-0003.log`` too, from the first one on.

    Args:
        run: The run's directory.
        rank: This process's.
    """
    file = logging.FileHandler(run / f"rank-{rank:04}.log", encoding="utf-8", delay=True)
    file.setFormatter(logging.Formatter(FILE_FORMAT))
    logging.getLogger().addHandler(file)
