"""The states of the generators that a training draws from: torch's, numpy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def states(device: torch.device | None = None) -> dict[str, Any]:
    """Return the states of all generators, with that of a device; as tensors and plain values."""
    kind, keys, *rest = np.random.get_state()
    found = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": random.getstate(),
    }
    if device is not None and device.type != "cpu":
        module = torch.get_device_module(device)
        if hasattr(module, "get_rng_state"):  # a backend that is not part of torch may have none
            found["device"] = module.get_rng_state(device)
    return found


def restore(found: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Go on from what `states` has returned."""
    torch.set_rng_state(found["torch"])
    kind, keys, *rest = found["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = found["python"]
    random.setstate((version, tuple(internal), gauss))
    if device is not None and device.type != "cpu" and "device" in found:
        torch.get_device_module(device).set_rng_state(found["device"], device)


def seed_anew(found: Mapping[str, Any], rank: int) -> None:
    """Seed all generators by another rank's states and this rank's number."""
    words = found["torch"].numpy().view(np.uint64)[:4]
    (seed,) = np.random.SeedSequence([*map(int, words), rank]).generate_state(1)
    torch.manual_seed(int(seed))
    np.random.seed(int(seed))
    random.seed(int(seed))
