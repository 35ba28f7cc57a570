"""Vectors whose every element is known by few numbers, so that all of them can be checked.

All elements of an array change alike, but for those at a few places, which are near its edges and
anywhere. So the arrays are known by a summary: for each array one number for most of its elements,
and one for each place.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

from collectives import empty_like
from collectives.memory import other_processes

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
KIB = 1024
# Bytes at which an exchange gets another slice, block or algorithm.
EDGES = (64, 16 * KIB, 32 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB)
LARGEST_CHANGE = 3
# Bytes before and after each array that nobody may change, and what they are.
GUARD, GUARDED = 64, 0xA5
# How ranks of a node use a vector that a call averages: where it is, if it is in a window, or by
# the kernel's copies; or through memory that they share.
WAYS = ("memory", "memory", "windows", "windows", "copies")
SHORTEST_COPIED = other_processes.shortest


class Poison(NamedTuple):
    """An element that is not finite."""

    array: int
    place: int
    value: float


class Shape:
    """The arrays of a vector: dtypes, lengths, places.

    Args:
        plan: `random.Random` that all ranks have alike.
        size: number of ranks.
        exact: whether all arrays are float64.

    Attributes:
        width: length of a summary.
        rounding: unit roundoff of each of its numbers.
    """

    def __init__(self, plan, size, exact):
        count = plan.choice((1, 1, 1, 2, 3, 5))
        self.dtypes = ["float64" if exact else plan.choice(tuple(DTYPES)) for _ in range(count)]
        self.lengths = [self._draw_length(plan, size, dtype, count) for dtype in self.dtypes]
        self.single = count == 1 and plan.random() < 0.7
        self.places = [self._draw_places(plan, length) for length in self.lengths]
        self.prepared = []
        self.width = sum(1 + len(places) for places in self.places)
        self.rounding = np.concatenate(
            [
                np.full(1 + len(places), ROUNDING[dtype])
                for dtype, places in zip(self.dtypes, self.places)
            ]
        )

    def _draw_length(self, plan, size, dtype, count):
        itemsize = DTYPES[dtype].itemsize
        if plan.random() < 0.5:
            return plan.choice((1, 2, 15, 16, 17, 100, 1000))
        most = 1024 * KIB if count == 1 and size <= 4 else 512 * KIB // count
        edges = [edge for edge in (*EDGES, size * 16 * KIB, size * 64) if edge <= most]
        return max(1, plan.choice(edges) // itemsize + plan.randint(-9, 9))

    def _draw_places(self, plan, length):
        drawn = {0, length - 1, plan.randrange(length), plan.randrange(length)}
        return sorted(drawn)[: length - 1]

    def __repr__(self):
        arrays = [f"{n} {dtype}" for n, dtype in zip(self.lengths, self.dtypes)]
        return f"{', '.join(arrays)}{'' if self.single else ' (list)'}"

    def new(self, summary):
        """Return arrays with this summary."""
        arrays = [*map(between_guards, self.prepared.pop() if self.prepared else self._zeros())]
        self.add(arrays, summary)
        return arrays

    def _zeros(self):
        """Return arrays that have room for guards."""
        dtypes = [DTYPES[name] for name in self.dtypes]
        return [
            np.zeros(n + 2 * GUARD // dtype.itemsize, dtype)
            for n, dtype in zip(self.lengths, dtypes)
        ]

    def prepare(self, comm, way):
        """Let shared memory be used this way, and the next vectors be in windows; collective."""
        other_processes.shortest = 0 if way == "copies" else SHORTEST_COPIED
        if way == "windows":
            self.prepared = [empty_like(comm, self._zeros()) for _ in range(2)]

    def given(self, arrays):
        """Return the arrays as a collective wants them."""
        return arrays[0] if self.single else list(arrays)

    def _parts(self, arrays):
        """Yield each array with its places and where its part of a summary begins."""
        begin = 0
        for array, places in zip(arrays, self.places):
            yield array, places, begin
            begin += 1 + len(places)

    def add(self, arrays, change):
        """Add a change, a summary of whole numbers."""
        for array, places, begin in self._parts(arrays):
            at_places = array[places]
            array += array.dtype.type(change[begin])
            own = change[begin + 1 : begin + 1 + len(places)]
            array[places] = at_places + own.astype(array.dtype)

    def summary(self, arrays):
        """Return the summary of arrays that have one (`is_even`)."""
        summary = np.empty(self.width)
        for array, places, begin in self._parts(arrays):
            summary[begin] = array[self._anywhere_else(places)]
            summary[begin + 1 : begin + 1 + len(places)] = array[places]
        return summary

    def numbers_of(self, indices):
        """Return which numbers of a summary are of these arrays."""
        counts = [1 + len(places) for places in self.places]
        return np.repeat([index in indices for index in range(len(counts))], counts)

    def is_even(self, arrays):
        """Return whether each array's elements are the same, bit for bit, but at its places.

        And whether those are unchanged that guard it, where it is not a copy.
        """
        for array, places, _ in self._parts(arrays):
            if array.base is not None and (guards_of(array.base) != GUARDED).any():
                return False
            bits = array.view(f"u{array.dtype.itemsize}")
            odd = np.flatnonzero(bits != bits[self._anywhere_else(places)])
            if not set(odd.tolist()) <= set(places):
                return False
        return True

    def draw_change(self, chance):
        """Return a change of all elements alike, or of one of them besides."""
        change = np.full(self.width, float(chance.randint(-LARGEST_CHANGE, LARGEST_CHANGE)))
        if chance.random() < 0.5:
            change[chance.randrange(self.width)] = chance.randint(-LARGEST_CHANGE, LARGEST_CHANGE)
        return change

    def draw_poison(self, chance):
        """Return which element is not finite, and what it is."""
        parts = list(enumerate(zip(self.lengths, self.places)))
        index, (length, places) = chance.choice(parts)
        # Any other element must stay like the rest.
        place = chance.choice(places) if length > 1 else 0
        return Poison(index, place, chance.choice((math.nan, math.inf, -math.inf)))

    def poison(self, arrays, poison):
        if poison:
            arrays[poison.array][poison.place] = poison.value

    def _anywhere_else(self, places):
        """Return the first element that is at no place."""
        return next(i for i in range(len(places) + 1) if i not in places)


def guards_of(whole):
    """Return the bytes that guard the array in the middle of this one."""
    return whole.view(np.uint8)[np.r_[:GUARD, -GUARD:0]]


def between_guards(whole):
    """Return the array in the middle of this one, whose first and last bytes become guards."""
    whole.view(np.uint8)[:GUARD] = whole.view(np.uint8)[-GUARD:] = GUARDED
    return whole[GUARD // whole.itemsize : -GUARD // whole.itemsize]


def copied(arrays):
    return [array.copy() for array in arrays]


def is_finite(arrays):
    return all(np.isfinite(array).all() for array in arrays)


def digest(arrays):
    """Return what tells whether two vectors are the same, bit for bit."""
    hashed = hashlib.blake2b(digest_size=8)
    for array in arrays:
        hashed.update(array.view(np.uint8))
    return hashed.hexdigest()
