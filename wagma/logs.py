"""Destinations of log messages: rank 0's on the terminal, every rank's in a file of its run.

The messages are those of the loggers "wagma" and "collectives", and warnings and errors of all
others, including Python's own warnings. Ranks other than 0 never write to the terminal, but files
have every rank's messages from "info" up, whatever level the terminal shows.
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

_handlers: list[logging.Handler] = []  # the root logger's handlers that this module added


class Terminal(logging.Handler):
    """Writes "wagma: warning: …" to the current standard error, which a progress bar replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        text = f"{record.name}: {record.levelname.lower()}: {self.format(record)}"
        print(text, file=sys.stderr, flush=True)


def start(level: str, rank: int) -> None:
    """Write rank 0's messages from ``level`` on to standard error.

    An earlier call's terminal and file get no more messages: a process may run several commands.

    Args:
        level: One of `LEVELS`.
        rank: This process's rank.
    """
    number = getattr(logging, level.upper())
    stop()
    # Without any handler, logging would write warnings itself.
    _add(Terminal(number) if rank == 0 else logging.NullHandler())
    for name in LOGGERS:
        logging.getLogger(name).setLevel(min(number, logging.INFO))
    os.environ.pop(VARIABLE, None)  # a collective would set its logger's level to it
    logging.captureWarnings(True)


def to_file(run: Path, rank: int) -> None:
    """Also write this rank's messages to the run's ``rank-0003.log``, made at the first one.

    Args:
        run: The run's directory.
        rank: This process's rank.
    """
    file = logging.FileHandler(run / f"rank-{rank:04}.log", encoding="utf-8", delay=True)
    file.setFormatter(logging.Formatter(FILE_FORMAT))
    _add(file)


def stop() -> None:
    """Write no more messages to the terminal and the files."""
    logging.captureWarnings(False)
    while _handlers:
        handler = _handlers.pop()
        logging.getLogger().removeHandler(handler)
        handler.close()


def _add(handler: logging.Handler) -> None:
    _handlers.append(handler)
    logging.getLogger().addHandler(handler)
