"""Device memory that other libraries of this process cache but do not use.

torch and CuPy keep freed memory for their next arrays; until they release it, the driver cannot
give it to anybody else.
"""

from __future__ import annotations

import contextlib
import sys

__all__ = ["empty"]


def empty() -> None:
    """Let torch and CuPy, if this process has loaded them, free memory that they only cache.

    This waits for the device. Neither is imported.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        # The second is a backend that is not part of torch, if there is any.
        for name in ("cuda", torch._C._get_privateuse1_backend_name()):
            module = getattr(torch, name, None)
            if hasattr(module, "empty_cache") and module.is_initialized():
                module.empty_cache()
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        with contextlib.suppress(AttributeError):  # still being imported
            cupy.get_default_memory_pool().free_all_blocks()
