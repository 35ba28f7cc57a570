"""CUDA's multi-process service, under which the kernels of several processes run side by side."""

import os

VARIABLE, DEFAULT = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"


def is_running() -> bool:
    """Return whether there is an MPS of which a process with this environment is a client."""
    return os.path.exists(f"{os.environ.get(VARIABLE, DEFAULT)}/control")
