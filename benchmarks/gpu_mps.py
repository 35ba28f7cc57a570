"""Starts CUDA's multi-process service, and ends it: see `wagma.mps`."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from wagma.mps import VARIABLE, is_running

CONTROL = "nvidia-cuda-mps-control"
LIMIT = 10.0  # seconds for MPS to start, and to end
TRIAL = 20.0  # seconds for it to be tried
QUIT = "quit -t 5\n"  # clients that remain are ended after so many seconds
FIRST_USE = 60.0  # seconds for a device to be tried, which may have to be initialized first


@contextlib.contextmanager
def mps():
    """Start MPS for a block, in a new directory; yield its clients' variables, or why it failed."""
    if VARIABLE in os.environ or is_running():
        yield {}, "MPS is there already, and all has been measured under it"
        return
    control = shutil.which(CONTROL)
    if control is None:
        yield {}, f"no {CONTROL} on PATH"
        return
    # What still ends may leave something there.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        env = {
            VARIABLE: f"{folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        }
        for path in env.values():
            Path(path).mkdir()
        try:
            # The daemon would keep a pipe open.
            why_not = why_failed([control, "-d"], env, subprocess.DEVNULL)
            why_not = why_not or why_no_device(env, TRIAL)
            yield env, why_not and f"MPS: {why_not}"
        finally:
            why_failed([control], env, input=QUIT)


def why_no_device(env, timeout=FIRST_USE):
    """Return why a process with these variables cannot use a device; None if it can."""
    command = [sys.executable, "-c", "import cuda_driver; cuda_driver.Device(0)"]
    return why_failed(command, env, timeout=timeout)


def why_failed(command, env, output=subprocess.PIPE, timeout=LIMIT, **options):
    """Run a command here; return why it failed, None if it did not."""
    try:
        subprocess.run(
            *(command,), env={**os.environ, **env}, cwd=Path(__file__).parent, check=True,
            timeout=timeout, text=True, stdout=subprocess.DEVNULL, stderr=output, **options,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        words = (error.stderr or "").strip().splitlines()
        return words[-1] if words else f"{command[0]} ended with status {error.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None
