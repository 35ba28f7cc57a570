"""Docstrings of public objects: what they must say, and that it is noticed where they do not."""

import docstrings
import numpy as np
import pytest

import collectives
from collectives.typing import Vector
from wagma import optim

PUBLIC = docstrings.public()


def test_public_objects_say_what_they_take_return_and_raise():
    """Shapes and dtypes of arrays, units of times, errors."""
    found = {path: [*docstrings.problems(*shown)] for path, shown in PUBLIC.items()}
    assert {path: lacks for path, lacks in found.items() if lacks} == {}


def test_every_method_and_property_of_the_api_is_looked_at():
    paths = {
        "collectives.GroupAllreduce.__call__",
        "collectives.PushSum.weight",
        "collectives.topology.shuffle",
        "collectives.errors.ClosedError",
        "wagma.optim.WAGMA.join",
        "wagma.simulation.Result.throughput",
        "wagma.wpsgd.rates.weights",
    }
    assert paths <= PUBLIC.keys()


@pytest.mark.parametrize("module", [collectives, optim], ids=lambda module: module.__name__)
def test_methods_name_their_source(module):
    others = {"Statistics", "CollectiveOptions", "Recovery", *collectives.errors.__all__}
    kinds = [getattr(module, name) for name in module.__all__ if name not in others]
    kinds = [kind for kind in kinds if isinstance(kind, type)]
    assert len(kinds) > 9
    assert [kind.__name__ for kind in kinds if not docstrings.has_source(kind)] == []


# --- What is noticed


def undocumented(): ...


def without_argument(count: int, rank: int) -> None:
    """Count.

    Args:
        count: how many.
    """


def without_dtype(vector: Vector) -> None:
    """Overwrite.

    Args:
        vector: array of shape (n,).
    """


def without_shape() -> np.ndarray:
    """Return a float64 array."""


def without_unit(stall: float) -> None:
    """Wait.

    Args:
        stall: how long.
    """


def without_result() -> int:
    """Count."""


def without_error(rank: int) -> None:
    """Check `rank`."""
    if rank:
        raise ValueError(rank)


def without_error_of_helper(rank: int) -> None:
    """Check `rank`."""
    _check(rank)


def _check(rank):
    raise IndexError(rank)


class Attributes:
    """Something.

    Attributes:
        first: a number.
    """

    def __init__(self):
        self.first, self.second = 1, 2

    @property
    def waited(self) -> float:
        """How long calls waited."""
        return 0.0


@pytest.mark.parametrize(
    ("each", "problem"),
    [
        (undocumented, "has no docstring"),
        (without_argument, "does not say what rank is"),
        (without_dtype, "does not give the shape and dtype of vector"),
        (without_shape, "does not give the shape and dtype of what it returns"),
        (without_unit, "does not give the unit of stall"),
        (without_result, "does not say what it returns"),
        (without_error, "does not say when it raises ValueError"),
        (without_error_of_helper, "does not say when it raises IndexError"),
        (Attributes, "does not say what second is"),
        (Attributes.waited, "does not give the unit of what it returns"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_a_docstring_lacks_is_noticed(each, problem):
    owner = Attributes if isinstance(each, property) else None
    assert [*docstrings.problems(each, owner)] == [problem]


def documented(vector: Vector, others: np.ndarray, seconds: float, *, rank: int) -> np.ndarray:
    """Average `vector` with others.

    Args:
        vector: those of `without_dtype`, of float32.
        others: float64 array of shape (n, n).
        seconds, rank: how many seconds to wait, and for whom.

    Returns:
        float64 array of shape (n,).

    Raises:
        ValueError: something.
    """
    raise ValueError(rank)


def test_a_docstring_that_says_all_of_it_lacks_nothing():
    assert [*docstrings.problems(documented)] == []
