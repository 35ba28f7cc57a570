"""Commands that gpu.py runs with a limited time, and what they report as ranks and at their end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ENDING = 5.0  # seconds that a job may take to end when it is told to
SO_FAR = "so-far.json"
EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Exit)\b.*")


def run_for(command, limit, cwd=None):
    """Run a command; return its exit status, None if it took too long, and its output."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        job = subprocess.Popen(
            *(command,), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=cwd,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = job.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(job)
        output.seek(0)
        return status, output.read()


def end(job):
    """End a launcher, and with it its ranks, unless it has ended; wait for a limited time."""
    if job.poll() is not None:
        return
    job.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(ENDING)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(ENDING)


def last_words(output):
    """Return the last exception in a command's output, or else its last line."""
    said = output.partition("BAD TERMINATION OF ONE")[0]  # from there on it is MPICH's launcher
    lines = [line.strip() for line in said.splitlines() if line.strip(" =")]
    exceptions = [line for line in lines if EXCEPTION.fullmatch(line)]
    return (exceptions or lines or [""])[-1]


@contextlib.contextmanager
def aborting(comm):
    """End the job if the block raises an exception on a rank, for which others may wait."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        comm.Abort(1)


def keep(comm, arguments, results):
    """Write a part's results so far, which remain if its job does not end; only rank 0 does.

    Args:
        arguments: those of gpu.py.
        results: what JSON can have.
    """
    if comm.rank:
        return
    path = Path(arguments.results) / SO_FAR
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, results)


def kept(folder):
    """Return the results that a job has written so far, None if there are none."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads((folder / SO_FAR).read_text(encoding="utf-8"))
    return None


def replace(path, contents):
    """Write JSON to a file; a process that is killed leaves the old contents or the new ones."""
    text = json.dumps(contents, indent=1, ensure_ascii=False) + "\n"
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
