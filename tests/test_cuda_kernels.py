"""The passes over vectors on devices: they compile for all, and have the bits of the host's."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from rounding import CODECS, DTYPES, numbers, same

from collectives.errors import CudaError
from collectives.memory import nvrtc
from collectives.memory.space import CODES

pytestmark = pytest.mark.slow  # NVRTC compiles for seconds

HERE = Path(__file__).parent
MEMORY = HERE.parent / "collectives" / "memory"
PASSES = ("combine", "mean", "add_change", "all_finite", "finite_change", "all_bounded")
NAMES = [f"{name}_{dtype}" for name in PASSES for dtype in DTYPES]
NAMES += [f"{name}_{dtype}_{wire}" for name in ("encode", "decode") for dtype, wire in CODECS]
# The oldest architecture that CUDA 13 knows, and the newest one of data centres and of desktops.
CAPABILITIES = [(7, 5), (8, 0), (9, 0), (10, 0), (12, 0)]

# --- compiled by NVRTC


@pytest.fixture(scope="module")
def library():
    try:
        return nvrtc.library()
    except CudaError as error:
        pytest.skip(str(error))


@pytest.mark.extra
@pytest.mark.parametrize("capability", CAPABILITIES, ids="sm_{0[0]}{0[1]}".format)
def test_every_kernel_compiles_for_every_device(library, monkeypatch, tmp_path, capability):
    monkeypatch.setenv("WAGMA_CACHE_DIR", str(tmp_path))
    code = nvrtc.kernels(capability)
    assert code.startswith(b"\x7fELF")
    assert all(name.encode() + b"\0" in code for name in NAMES)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(b"kept")
    assert nvrtc.kernels(capability) == b"kept"


def test_a_device_that_it_does_not_know_is_named(library, monkeypatch, tmp_path):
    monkeypatch.setenv("WAGMA_CACHE_DIR", str(tmp_path))
    with pytest.raises(CudaError, match=r"nvrtcCompileProgram returned .* for .*sm_11"):
        nvrtc.kernels((1, 1))
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_compile_is_shown(library):
    with pytest.raises(CudaError, match=r"kernels\.cu\(1\): error: (.*\n)+ *nonsense;"):
        nvrtc.compiled(library, b"nonsense;", {}, ["--gpu-architecture=sm_90"])


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(library, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("WAGMA_CACHE_DIR", str(tmp_path / "file"))
    assert nvrtc.kernels((9, 0)).startswith(b"\x7fELF")


def test_no_nvrtc_is_one_error_that_names_it(monkeypatch):
    monkeypatch.setenv("WAGMA_NVRTC_LIBRARY", "/nowhere/libnvrtc.so")
    with pytest.raises(CudaError, match="no NVRTC to compile kernels with: /nowhere/libnvrtc.so"):
        nvrtc.kernels((9, 0))


@pytest.mark.parametrize(("driver", "first"), [(13000, 13), (12040, 12), (None, 13)])
def test_the_nvrtc_is_one_whose_code_the_driver_loads(monkeypatch, tmp_path, driver, first):
    class Driver:
        def cuDriverGetVersion(self, version):
            version._obj.value = driver

    def library():
        if driver is None:
            raise CudaError("no CUDA driver")
        return Driver()

    monkeypatch.delenv("WAGMA_NVRTC_LIBRARY", raising=False)
    monkeypatch.setattr(nvrtc.plain_device, "library", library)
    monkeypatch.setattr(nvrtc, "folders", lambda: [tmp_path / "new", tmp_path / "old"])
    for folder, version in (("new", 13), ("old", 12)):
        (tmp_path / folder / "lib").mkdir(parents=True)
        (tmp_path / folder / "lib" / f"libnvrtc.so.{version}").touch()
    loaded = []
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", loaded.append)
    nvrtc.library()
    assert [Path(path).name for path in loaded] == [f"libnvrtc.so.{first}"]
    assert Path(loaded[0]).exists()


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def expanduser(path):
        raise RuntimeError("Could not determine home directory.")

    for name in ("WAGMA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", expanduser)
    kept = nvrtc.cache() / "kernels"
    with pytest.raises(OSError):
        kept.read_bytes()
    with pytest.raises(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)


# --- compiled by the host's compiler


class Passes(ctypes.Structure):
    """`Kernels` of kernels.h."""

    _fields_ = (
        ("itemsize", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in (*PASSES[:5], "take_change")),
    )


class Codec(ctypes.Structure):
    """`Codec` of kernels.h."""

    _fields_ = (("encode", ctypes.c_void_p), ("decode", ctypes.c_void_p))


class Members(ctypes.Structure):
    """`Members` of members.h."""

    _fields_ = (
        ("vectors", ctypes.c_void_p * 250),
        ("shares", ctypes.c_double * 250),
        ("count", ctypes.c_int),
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return both as libraries: the host's passes, and the kernels."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    options = ["-O2", "-ffp-contract=off", "-fno-trapping-math", "-fPIC", "-shared"]
    libraries = []
    for source in ("host_passes.c", "host_kernels.c"):
        target = tmp_path_factory.mktemp("kernels") / "library.so"
        command = [compiler, *options, "-I", MEMORY, HERE / "kernels" / source, "-o", target]
        subprocess.run(command, check=True)
        libraries.append(ctypes.CDLL(str(target)))
    return libraries


GRID, BLOCK = 3, 5


def launch(kernels, name, *arguments):
    """Run all threads of a kernel, one after the other."""
    places = {
        each: ctypes.c_uint.in_dll(kernels, each)
        for each in ("blockIdx", "threadIdx", "blockDim", "gridDim")
    }
    places["gridDim"].value, places["blockDim"].value = GRID, BLOCK
    for thread in range(GRID * BLOCK):
        places["blockIdx"].value, places["threadIdx"].value = divmod(thread, BLOCK)
        getattr(kernels, name)(*map(as_c, arguments))


def as_c(argument):
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    kinds = {int: ctypes.c_int, float: ctypes.c_double}
    return kinds.get(type(argument), lambda given: given)(argument)


def host(function, result, *arguments):
    """Call one of the host's passes."""
    given = [as_c(argument) for argument in arguments]
    return ctypes.CFUNCTYPE(result, *map(type, given))(function)(*given)


def many(n):
    return ctypes.c_longlong(n)


def passes_of(library, dtype):
    found = Passes()
    library.passes_of(ctypes.byref(found), ord(CODES[dtype]))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_vectors_are_combined_alike(built, dtype):
    passes, kernels = built
    a, b = numbers(dtype, 0), numbers(dtype, 1)
    ours, theirs = np.zeros_like(a), np.zeros_like(a)
    combine = passes_of(passes, dtype).combine
    host(combine, None, theirs, a, 1 / 3, b, 2 / 3, ctypes.c_ssize_t(len(a)))
    launch(kernels, f"combine_{dtype}", ours, a, 1 / 3, b, 2 / 3, many(len(a)))
    assert same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("me", [0, 1, 3])
@pytest.mark.parametrize("shares", [(0.5, 0.25, 0.125, 0.125), (0.0, 0.7, 0.0, 0.3), 4 * (0.0,)])
def test_vectors_have_the_same_mean(built, dtype, me, shares):
    """The mean replaces one of them."""
    passes, kernels = built
    vectors = [numbers(dtype, seed) for seed in range(4)]
    size, shares = len(vectors[0]), np.array(shares)
    pointers = np.array([vector.ctypes.data for vector in vectors])
    outs = [np.zeros_like(vectors[0]) for _ in range(3)]
    theirs = outs[0]
    to = np.array([out.ctypes.data for out in outs])
    mean = passes_of(passes, dtype).mean
    for takers in (1, 2, 3):
        host(mean, None, to, takers, pointers, shares, 4, ctypes.c_ssize_t(size))
        assert all(same(out, theirs) for out in outs[:takers])
    used = np.flatnonzero(shares)
    members = Members(tuple(pointers[used].tolist()), tuple(shares[used]), len(used))
    launch(kernels, f"mean_{dtype}", vectors[me], members, many(size))
    assert same(vectors[me], theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_change_is_added_alike(built, dtype):
    passes, kernels = built
    given = [numbers(dtype, seed) for seed in range(3)]
    ours, theirs = np.zeros_like(given[0]), np.zeros_like(given[0])
    size = len(ours)
    host(passes_of(passes, dtype).add_change, None, theirs, *given, ctypes.c_ssize_t(size))
    launch(kernels, f"add_change_{dtype}", ours, *given, many(size))
    assert same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [None, np.inf, -np.inf, np.nan])
def test_a_change_is_taken_in_one_pass(built, dtype, bad):
    """The vector and the base become what `add_change` returns; the snapshot stays."""
    passes = passes_of(built[0], dtype)
    snapshot, x, base = (numbers(dtype, seed) for seed in range(3))
    if bad is not None:
        x[7] = bad
    size, before, changed = ctypes.c_ssize_t(len(x)), snapshot.copy(), np.zeros_like(x)
    host(passes.add_change, None, changed, snapshot, x, base, size)
    finite = host(passes.finite_change, ctypes.c_int, snapshot, x, base, size)
    assert finite == host(passes.take_change, ctypes.c_int, x, snapshot, base, size)
    assert same(x, changed) and same(base, changed) and same(snapshot, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", ["all_finite", "finite_change"])
@pytest.mark.parametrize("bad", [None, np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_found_alike(built, dtype, what, bad):
    passes, kernels = built
    kind = DTYPES[dtype]
    vectors = [np.full(1001, value, kind) for value in (1.5, 0.25, 0.125)]
    given = vectors[: 1 if what == "all_finite" else 3]
    if bad is not None:
        given[-1][777] = bad
    finite = np.ones(1, np.int32)
    function = getattr(passes_of(passes, dtype), what)
    theirs = host(function, ctypes.c_int, *given, ctypes.c_ssize_t(1001))
    launch(kernels, f"{what}_{dtype}", finite, *given, many(1001))
    assert finite[0] == theirs == (bad is None)


def test_a_change_may_be_too_large(built):
    """1e38 + (3e38 − −1e38) is infinite though all three are not."""
    passes, kernels = built
    given = [np.full(7, value, np.float32) for value in (1e38, 3e38, -1e38)]
    finite = np.ones(1, np.int32)
    launch(kernels, "finite_change_float32", finite, *given, many(7))
    function = passes_of(passes, "float32").finite_change
    assert finite[0] == 0 == host(function, ctypes.c_int, *given, ctypes.c_ssize_t(7))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_bounded_makes_no_change_too_large(built, dtype):
    passes, kernels = built
    kind = DTYPES[dtype]
    largest = np.finfo(kind).max
    change = passes_of(passes, dtype).finite_change
    for value in (0, -1, 2.0**63, -(2.0**63), 2.0**64, -largest, largest, np.inf, -np.inf, np.nan):
        x, bounded = np.ones(1001, kind), np.ones(1, np.int32)
        x[777] = value
        launch(kernels, f"all_bounded_{dtype}", bounded, x, many(1001))
        assert bounded[0] == (abs(value) < 2.0**64)
        if bounded[0]:
            for y in (largest, -largest):
                y = np.full(1001, y, kind)
                assert host(change, ctypes.c_int, x, y, x, ctypes.c_ssize_t(1001))


@pytest.mark.parametrize(("dtype", "wire"), CODECS)
def test_what_travels_is_rounded_alike(built, dtype, wire):
    passes, kernels = built
    codec = Codec()
    passes.codec_of(ctypes.byref(codec), ord(CODES[dtype]), ord(CODES[wire]))
    x, reference = numbers(dtype, 0), numbers(dtype, 1)
    size = len(x)
    ours, theirs = (np.zeros(size, DTYPES[wire]) for _ in range(2))
    host(codec.encode, None, theirs, x, reference, ctypes.c_ssize_t(size))
    launch(kernels, f"encode_{dtype}_{wire}", ours, x, reference, many(size))
    assert same(ours, theirs)
    back, again = np.zeros_like(x), np.zeros_like(x)
    host(codec.decode, None, again, ours, reference, ctypes.c_ssize_t(size))
    launch(kernels, f"decode_{dtype}_{wire}", back, ours, reference, many(size))
    assert same(back, again)
