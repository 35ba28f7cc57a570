"""Numbers that arithmetic may round differently, and whether results are the same to the bit."""

import ml_dtypes
import numpy as np

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
# What travels for what.
CODECS = [(dtype, wire) for dtype in ("float32", "float64") for wire in ("float16", "bfloat16")]


def numbers(dtype, seed, n=5003):
    """Bit patterns of all kinds: subnormal numbers, zeros of both signs, infinities, NaN."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(DTYPES[dtype])
    bits = rng.integers(0, 256, n * kind.itemsize, np.uint8).view(kind)
    usual = rng.standard_normal(n).astype(kind)
    tiny = (usual.astype(np.float64) * 2.0 ** rng.integers(-30, 3, n)).astype(kind)
    return np.ascontiguousarray(np.choose(rng.integers(0, 3, n), [bits, usual, tiny]))


def same(a, b):
    """Whether all bits are the same, of NaN only that it is."""
    unsigned = f"u{a.itemsize}"
    nan = np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64))
    return ((a.view(unsigned) == b.view(unsigned)) | nan).all()
