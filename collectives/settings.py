"""The arguments of collectives: their defaults and their checks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import pairwise

import numpy as np

from collectives.agreement import by_value, list_values
from collectives.device_arrays import TO_COPY, is_on_device

__all__ = [
    "DEFAULT_LATE",
    "array_error",
    "average_error",
    "checked_weight",
    "difference",
    "first_error",
    "group_error",
    "level_name",
    "limits",
    "name_of_dtype",
    "period_error",
    "resolve",
    "set_log_level",
    "sharing_error",
    "version_error",
    "weighing",
]

DEFAULT_LATE = "conserving"

DTYPES = ("float16", "bfloat16", "float32", "float64")
LARGEST_VERSION = LARGEST_INTEGER = 2**60
LONGEST_TEXT = 200  # characters of a value in a message
LARGEST_SEED = 2**64 - 1
LARGEST_WEIGHT = 1e100  # the sum over all ranks must be finite
CHOICES = {
    "groups": ("changing", "fixed"),
    "pace": ("common", "own"),
    "wait": ("nobody", "group"),
    "late": ("paper", "conserving"),
    "engine": ("adaptive", "dedicated", "none"),
    "transport": (None, "shared", "messages"),
    "trigger": ("solo", "majority"),
}
WEIGHTS = ("given", "work", "wp")
WIRE_DTYPES = ("float16", "bfloat16")
LOG_LEVELS = ("debug", "info", "warning", "error")
# Settings that may be set in the environment: the variable, and the default.
VARIABLES = {
    "engine": ("WAGMA_ENGINE", "adaptive"),
    "transport": ("WAGMA_TRANSPORT", None),
    "stall": ("WAGMA_STALL", 60.0),
    "abort": ("WAGMA_ABORT", 0.0),
    "log_level": ("WAGMA_LOG_LEVEL", None),
}
# Settings that need not be the same on all ranks.
OWN = ("stall", "abort", "log_level", "keep_average")


def resolve(like, options, **given) -> dict:
    """Return the settings of a collective: arguments, else variables, else defaults.

    Args:
        options: see `CollectiveOptions`; those that are unknown are ignored.
        given: the other arguments.
    """
    for name in VARIABLES:
        given[name] = or_default(name, options.get(name))
    for name in ("stall", "abort"):
        with contextlib.suppress(TypeError, ValueError):  # first_error says so
            given[name] = float(given[name])
    arrays = like if isinstance(like, (list, tuple)) else [like]
    lengths = [getattr(array, "size", None) for array in arrays]
    dtypes = [str(getattr(array, "dtype", None)) for array in arrays]
    single = not isinstance(like, (list, tuple))
    given["length"] = lengths[0] if single else lengths
    given["dtype"] = dtypes[0] if single else dtypes
    given["version of wagma"] = package_version()
    return given


def unknown_option(kind: type, known, options) -> Exception | None:
    """Return the error if an option is not one of the class's, `known`; else None."""
    unknown = [name for name in options if name not in known.__optional_keys__]
    if unknown:
        name = shown_name(kind)
        return TypeError(f"{name}() got an unexpected keyword argument {unknown[0]!r}")
    return None


def shown_name(kind: type) -> str:
    """Return a class's name as users know it."""
    return getattr(kind, "_shown_name", kind.__name__).lstrip("_")


@functools.cache
def package_version() -> str:
    """Return the package's version, which must be the same on all ranks."""
    try:
        return metadata.version("wagma")
    except metadata.PackageNotFoundError:
        return "unknown"


def or_default(name: str, given):
    """Return a setting as given, else from its variable, else its default."""
    variable, default = VARIABLES[name]
    return os.environ.get(variable, default) if given is None else given


def limits(options) -> tuple[float, float]:
    """Return `stall` and `abort` in seconds, as given or by default; 0 if invalid."""
    values = []
    for name in ("stall", "abort"):
        try:
            value = float(or_default(name, options.get(name)))
        except (TypeError, ValueError):  # `first_error` says so
            value = 0.0
        values.append(value if math.isfinite(value) and value > 0 else 0.0)
    return values[0], values[1]


def name_of_dtype(dtype):
    """Return the name of a dtype of numpy, ml_dtypes or torch; anything else is returned unchanged.

    torch's dtypes are recognized by their text, without torch.
    """
    name = dtype.__name__ if isinstance(dtype, type) else str(dtype).removeprefix("torch.")
    return name if name in WIRE_DTYPES else dtype


def first_error(like, settings: dict) -> Exception | None:
    """Return the first error in this rank's arguments, or None."""
    return choice_error(settings) or vector_error(like)


def group_error(comm, settings: dict) -> Exception | None:
    """Return the error in the arguments that control group averages, or None."""
    group_size = settings["group_size"]
    if not is_integer(group_size):
        return TypeError(f"group_size is {group_size!r}, not an integer")
    if not 1 <= group_size <= comm.size:
        return ValueError(
            f"group_size is {group_size}, not between 1 and {comm.size}, the number of ranks"
        )
    return (
        period_error(settings)
        or seed_error(settings.get("seed", 0))
        or average_error(settings)
        or pace_error(settings)
    )


def periods_error(settings: dict) -> Exception | None:
    """Return the error in which arrays take part in which versions, or None."""
    only, every = settings.get("only_all_ranks", ()), settings.get("every") or {}
    if not isinstance(only, Sequence) or isinstance(only, str):
        return TypeError(f"only_all_ranks is {only!r}, not a list of indices")
    if not isinstance(every, Mapping):
        return TypeError(f"every is {every!r}, not a dict from indices to numbers of versions")
    if not only and not every:
        return None
    count = array_count(settings)
    for index in (*only, *every):
        if not is_integer(index):
            return TypeError(f"array {index!r} of only_all_ranks or every is not an integer")
        if not 0 <= index < count:
            return ValueError(f"there is no array {index} for only_all_ranks or every: {count} are")
    for index, period in every.items():
        if not is_integer(period):
            return TypeError(f"every[{index}] is {period!r}, not an integer")
        if not 1 <= period <= LARGEST_INTEGER:
            return ValueError(f"every[{index}] is {period}, not 1 to {LARGEST_INTEGER}")
        if index in only:
            return ValueError(f"array {index} is in only_all_ranks and in every")
    if settings["late"] != "conserving":
        return ValueError(
            f"late is {settings['late']!r} with only_all_ranks or every, not 'conserving': under "
            "another rule an array that is left out of a version would lose updates"
        )
    return order_error(periods_of(settings))


def lease_error(settings: dict) -> Exception | None:
    """Return the error in which arrays are leased, or None."""
    leased = settings.get("leased", ())
    if not isinstance(leased, Sequence) or not all(map(is_integer, leased)):
        return TypeError(f"leased is {leased!r}, not a list of indices")
    if not leased:
        return None
    begin, end = min(leased), max(leased) + 1
    if begin < 0 or end > array_count(settings) or sorted(leased) != list(range(begin, end)):
        return ValueError(
            f"leased is {leased!r}, not indices of arrays in a row: there are "
            f"{array_count(settings)}"
        )
    if settings.get("pace") != "own":
        return ValueError(
            "leased is given with pace 'common', in which no rank is late for so long"
        )
    return None


def leased_of(settings: dict) -> tuple[int, int] | None:
    """Return the first of the leased arrays and the one after the last; None: there are none."""
    leased = settings.get("leased", ())
    return (min(leased), max(leased) + 1) if leased else None


def by_value_error(settings: dict) -> Exception | None:
    """Return the error in which arrays are averaged by value, or None."""
    by_value, count = settings.get("by_value", ()), array_count(settings)
    if not isinstance(by_value, Sequence) or not all(map(is_integer, by_value)):
        return TypeError(f"by_value is {by_value!r}, not a list of indices")
    for index in by_value:
        if not 0 <= index < count:
            return ValueError(f"there is no array {index} for by_value: {count} are")
        if index in settings.get("leased", ()):
            return ValueError(
                f"array {index} is in by_value and in leased: parts of a sum are changes"
            )
    return None


def order_error(periods: tuple[int, ...]) -> Exception | None:
    """Return why these periods of arrays are in a wrong order, or None."""
    if periods[0] != 1:
        return ValueError("array 0 must take part in every version")
    for index in range(1, len(periods)):
        before, period = periods[index - 1 : index + 1]
        if period and (before == 0 or period % before):
            return ValueError(
                f"array {index} takes part in versions in which array {index - 1} does not: an "
                "array must take part whenever a later one does"
            )
    return None


def periods_of(settings: dict) -> tuple[int, ...]:
    """Return for each array the versions from one that averages it to the next.

    0: only averages over all ranks do.
    """
    only, every = settings.get("only_all_ranks", ()), settings.get("every") or {}
    indices = range(array_count(settings))
    return tuple(0 if index in only else int(every.get(index, 1)) for index in indices)


def array_count(settings: dict) -> int:
    """Return the number of arrays that are averaged together."""
    length = settings["length"]
    return len(length) if isinstance(length, list) else 1


def pace_error(settings: dict) -> Exception | None:
    """Return the error in settings that exclude ranks at their own pace, or None."""
    keeps = settings.get("keep_average", False)
    if not isinstance(keeps, bool):
        return TypeError(f"keep_average is {keeps!r}, not True or False")
    if settings.get("pace") != "own":
        if keeps:
            return ValueError(
                "keep_average is True with pace 'common', in which ranks average over all in step: "
                "take the model after such a step, or average()"
            )
        return None
    reasons = {
        "wait": ("nobody", "no rank waits for the calls of another"),
        "late": ("conserving", "it averages snapshots, to which calls add changes"),
        "weights": ("given", "all snapshots have the same weight, so that no update is lost"),
    }
    for name, (value, why) in reasons.items():
        if settings[name] != value:
            return ValueError(f"{name} is {settings[name]!r} with pace 'own', not {value!r}: {why}")
    return None


def period_error(settings: dict) -> Exception | None:
    """Return the error in an averaging period, or None."""
    sync_period = settings["sync_period"]
    if not is_integer(sync_period):
        return TypeError(f"sync_period is {sync_period!r}, not an integer")
    if sync_period < 1:
        return ValueError(f"sync_period is {sync_period}, less than 1")
    if sync_period > LARGEST_INTEGER:
        return ValueError(f"sync_period is {sync_period}, more than {LARGEST_INTEGER}")
    return None


def average_error(settings: dict) -> Exception | None:
    """Return the error in the arguments that control averages, or None."""
    weights, contraction = settings["weights"], settings["contraction"]
    if weights not in WEIGHTS:
        return ValueError(f"weights is {weights!r}, not one of {', '.join(WEIGHTS)}")
    if isinstance(contraction, (str, bool)) or not hasattr(contraction, "__float__"):
        return TypeError(f"contraction is {contraction!r}, not a number")
    if not 0 < contraction < 1:
        return ValueError(f"contraction is {contraction:g}, not between 0 and 1")
    return wire_dtype_error(settings["wire_dtype"])


def weighing(weights: str, contraction: float, sync_period: int) -> tuple[int, float, float]:
    """Return the engine's weighting: the arguments of `ContributionProtocol.weigh_by`."""
    return WEIGHTS.index(weights), math.log(contraction), float(sync_period)


def wire_dtype_error(wire_dtype) -> Exception | None:
    """Return the error in a dtype for sending vectors, or None."""
    if wire_dtype is None or (isinstance(wire_dtype, str) and wire_dtype in WIRE_DTYPES):
        return None
    return ValueError(f"wire_dtype is {wire_dtype!r}, not one of {', '.join(WIRE_DTYPES)}")


def checked_weight(weight, name: str = "weight") -> float:
    """Return the weight of a vector as a float; raise TypeError or ValueError if it is invalid."""
    if isinstance(weight, (str, bool, np.bool_)) or not hasattr(weight, "__float__"):
        raise TypeError(f"{name} is a {type(weight).__name__}, not a number")
    try:
        value = float(weight)
    except OverflowError:
        value = math.inf
    if not 0 <= value <= LARGEST_WEIGHT:
        raise ValueError(f"{name} is {value:g}, not between 0 and {LARGEST_WEIGHT:g}")
    return value


def version_error(version) -> Exception | None:
    """Return the error in a version to load, or None."""
    if not is_integer(version):
        return TypeError(f"version is {version!r}, not an integer")
    if not 0 <= version <= LARGEST_VERSION:
        return ValueError(f"version is {version}, not between 0 and {LARGEST_VERSION}")
    return None


def seed_error(seed) -> Exception | None:
    """Return the error in a seed, or None."""
    if not is_integer(seed):
        return TypeError(f"seed is {seed!r}, not an integer")
    if not 0 <= seed <= LARGEST_SEED:
        return ValueError(f"seed is {seed}, not between 0 and {LARGEST_SEED}")
    return None


def is_integer(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def checked_integer(
    name: str, value, least: int, most: int | None = None, largest: int = LARGEST_INTEGER
) -> int:
    """Return an integer argument from `least` to `most` (if given), or raise.

    Args:
        largest: the bound if `most` is None: beyond it, computations may overflow.
    """
    if not is_integer(value):
        raise TypeError(f"{name} is {value!r}, not an integer")
    if most is not None and not least <= value <= most:
        raise ValueError(f"{name} is {value}, not between {least} and {most}")
    if value < least:
        raise ValueError(f"{name} is {value}, less than {least}")
    if most is None and value > largest:
        raise ValueError(f"{name} is {value}, more than {largest}")
    return int(value)


def choice_error(settings: dict) -> Exception | None:
    """Return the error in a setting with fixed choices or in a time, or None."""

    def name_of(setting):
        variable = VARIABLES.get(setting, (None,))[0]
        return f"{setting} ({variable})" if variable else setting

    for name, allowed in CHOICES.items():
        if name in settings and settings[name] not in allowed:
            words = ", ".join(filter(None, allowed))
            return ValueError(f"{name_of(name)} is {settings[name]!r}, not one of {words}")
    for name in ("stall", "abort"):
        value = settings[name]
        if not (isinstance(value, float) and math.isfinite(value) and value >= 0):
            return ValueError(
                f"{name_of(name)} is {value!r}, not a number of seconds of at least 0 (0: never)"
            )
    level = settings["log_level"]
    if level is not None and str(level).lower() not in LOG_LEVELS:
        return ValueError(
            f"{name_of('log_level')} is {level!r}, not one of {', '.join(LOG_LEVELS)}"
        )
    return None


def vector_error(like) -> Exception | None:
    """Return the error in the initial vector, or None."""
    if not isinstance(like, (list, tuple)):
        return array_error("like", like)
    if not like:
        return ValueError("like is an empty list")
    errors = (array_error(f"like[{index}]", array) for index, array in enumerate(like))
    return next(filter(None, errors), None) or sharing_error(like, "like[{}]")


def sharing_error(arrays, name: str) -> Exception | None:
    """Return an error that names two arrays which share memory, or None.

    Args:
        arrays: list of 1-D arrays, contiguous and not empty.
        name: the name of one of them in the message, with {} for its index.
    """
    starts = [array.__array_interface__["data"][0] for array in arrays]
    order = sorted(range(len(arrays)), key=starts.__getitem__)
    for pair in pairwise(order):  # if any two share memory, some neighbors do
        if starts[pair[0]] + arrays[pair[0]].nbytes > starts[pair[1]]:
            first, second = (name.format(index) for index in sorted(pair))
            return ValueError(
                f"{first} and {second} share memory, which would be averaged twice: "
                "pass arrays without a common element"
            )
    return None


def array_error(name: str, array, dtype=None, size=None) -> Exception | None:
    """Return why an array cannot be averaged, or not with this dtype and size, or None."""
    if not isinstance(array, np.ndarray):
        hint = tensor_hint(array)
        return TypeError(f"{name} is a {type(array).__name__}, not a numpy array{hint}")
    if dtype is not None and array.dtype.name != dtype:
        return TypeError(f"{name} is of dtype {array.dtype}, the collective's of {dtype}")
    if array.dtype.name not in DTYPES:
        return TypeError(f"{name} is of dtype {array.dtype}, not one of {', '.join(DTYPES)}")
    if not array.dtype.isnative:
        return TypeError(f"{name} is of dtype {array.dtype}, not of this machine's byte order")
    if array.ndim != 1:
        hint = ": pass x.reshape(-1), a view of it" if array.flags.c_contiguous else ""
        return ValueError(f"{name} has {array.ndim} dimensions, not one{hint}")
    if size is not None and array.size != size:
        return ValueError(f"{name} has {array.size} elements, the collective's have {size}")
    if array.size == 0:
        return ValueError(f"{name} is empty")
    if not array.flags.c_contiguous:
        return ValueError(f"{name} is not contiguous{TO_COPY}")
    if not array.flags.aligned:
        return ValueError(f"{name} is not aligned")
    if not array.flags.writeable:
        return ValueError(f"{name} is read-only")
    return None


def tensor_hint(tensor) -> str:
    """Return how to pass a tensor of torch, as the end of a message; else nothing."""
    if is_on_device(tensor):
        return ": the collective was made with numpy arrays, and takes no others"
    if not (hasattr(tensor, "numpy") and hasattr(tensor, "device")):
        return ""
    if str(tensor.device) == "cpu":
        return ": pass x.detach().numpy(), which shares its memory"
    return (
        f": it is on {tensor.device}; pass a host copy, x.detach().cpu().numpy(), and copy the "
        "result back"
    )


def level_name(level: int) -> str:
    """Return the name of an MPI thread level."""
    from mpi4py import MPI

    names = {
        MPI.THREAD_SINGLE: "SINGLE",
        MPI.THREAD_FUNNELED: "FUNNELED",
        MPI.THREAD_SERIALIZED: "SERIALIZED",
        MPI.THREAD_MULTIPLE: "MULTIPLE",
    }
    return names[level]


def difference(comm, settings: dict) -> Exception | None:
    """Return the first setting that differs between the ranks, the same on all, or None."""
    mine = {name: _short(value) for name, value in settings.items() if name not in OWN}
    everyone = comm.allgather(mine)
    for name in mine:
        values = by_value(theirs[name] for theirs in everyone)
        if len(values) > 1:
            return ValueError(f"{name} differs between ranks: {list_values(values)}")
    return None


def _short(value) -> str:
    """Return a value as text; long ones, such as matrices, as a digest."""
    text = str(value)
    if len(text) <= LONGEST_TEXT:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[:LONGEST_TEXT]}… (digest {digest})"


def set_log_level(level: str | None) -> None:
    """Set the level of the collectives' logger; None leaves it unchanged."""
    if level is not None:
        logging.getLogger("collectives").setLevel(level.upper())
