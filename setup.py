"""Build the native extensions; pyproject.toml holds everything else."""

import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import mpi4py
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "build_backend"))

from wagma_build import find_mpicc

# No fused multiply-add: all members of a group must round alike, in whichever order they add.
# Nothing reads the floating-point exception flags; if they had to be right, conversions of fp16 and
# bf16 would not be vectorized.
ARITHMETIC = ["-ffp-contract=off", "-fno-trapping-math"]
# Without debugging information, of generated code, compilation takes a fifth less time.
OPTIONS = ["-O3", "-g0", *ARITHMETIC, "-pthread"]
# Cython's, for all modules. What it has translated already it translates again only after `make
# clean`, or where a module itself has changed.
DIRECTIVES = {"language_level": 3, "boundscheck": False, "wraparound": False}


def mpi_flags():
    """Return what `mpicc -show` (MPICH and Open MPI alike) adds to the compiler's command line."""
    mpicc = find_mpicc()
    if mpicc is None:
        sys.exit(
            "wagma: no MPI compiler. Name one (MPICC=/path/to/mpicc), put mpicc on PATH, "
            "or `pip install mpich`."
        )
    words = shlex.split(subprocess.check_output([mpicc, "-show"], text=True))
    return {
        "extra_compile_args": [w for w in words if w.startswith(("-I", "-D"))],
        # No rpath: mpi4py has loaded its MPI before the extension, and there must be one only.
        "extra_link_args": [w for w in words if w.startswith(("-L", "-l"))],
    }


def record(flags):
    """Return a file that changes with the flags, so that another MPI means another build."""
    path = Path("build/mpi-flags")
    if not path.exists() or path.read_text() != str(flags):
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(flags))
    return str(path)


def extension(source, extra_compile_args=(), extra_link_args=(), **options):
    return Extension(
        ".".join(source.with_suffix("").parts),
        [str(source)],
        extra_compile_args=[*OPTIONS, *extra_compile_args],
        extra_link_args=["-pthread", *extra_link_args],
        **options,
    )


def sources(folder):
    """Return what is compiled in a folder: Cython's files, and Python's that a .pxd declares."""
    declared = [file.with_suffix(".py") for file in Path(folder).glob("*.pxd")]
    return sorted([*Path(folder).glob("*.pyx"), *(file for file in declared if file.exists())])


class Progress:
    """The build as one line: on a terminal it counts modules; elsewhere it is written once.

    Args:
        count: Number of modules; 0 shows nothing.
    """

    def __init__(self, count):
        self.count, self.done = count, 0
        self.counts = sys.stdout.isatty()
        self.lock = threading.Lock()  # modules are compiled by several threads
        if count:
            self.show(f"Building wagma: {count} module{'s' if count > 1 else ''}")

    def show(self, text):
        """Write the line; what the compiler says meanwhile on a terminal goes over it."""
        last = self.done == self.count or not self.counts
        print(text, end="\n" if last else "\r", flush=True)

    def add(self):
        """Count another module."""
        with self.lock:
            self.done += 1
            if self.counts:
                self.show(f"Building wagma: {self.done} of {self.count} modules")


class CountedBuild(build_ext):
    """Shows the progress."""

    def build_extension(self, extension):
        super().build_extension(extension)
        progress.add()


pure = [
    extension(source)
    for folder in (
        "collectives/protocols",
        "collectives/memory",
        "collectives/recording",
        "wagma/simulation",
        "wagma/wpsgd",
    )
    for source in sources(folder)
]
# What Cython would else repeat in each extension, and take as long again to compile.
UTILITIES = "collectives._utilities"
utilities = [extension(Path("collectives/_utilities.c"))]
flags = mpi_flags()
flags["extra_compile_args"].append(f"-I{mpi4py.get_include()}")
engine = [
    extension(source, depends=[record(flags)], **flags)
    for folder in (*sorted(Path("collectives/exchange").glob("**/")), "collectives/engine")
    for source in sources(folder)
]

cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
# An editable install compiles without the files of a build in place, such as make does afterwards.
extensions = utilities + pure + engine
if os.environ.get("WAGMA_EXTENSIONS") == "later":
    extensions = []
quiet = "--quiet" in sys.argv
progress = Progress(len(extensions) if quiet else 0)


def cythonized(extensions, **directives):
    """Return the extensions with their modules as C."""
    return cythonize(
        extensions,
        build_dir="build/cython",
        nthreads=cores,
        quiet=quiet,
        compiler_directives=DIRECTIVES | directives,
        shared_utility_qualified_name=UTILITIES if extensions else None,
    )


# Python's divide as Python does, since it is their source that tests run.
python = [each for each in extensions if each.sources[0].endswith(".py")]
native = [each for each in extensions if each not in python]
setup(
    ext_modules=[*cythonized(native, cdivision=True), *cythonized(python)],
    cmdclass={"build_ext": CountedBuild} if quiet else {},
    options={"build_ext": {"parallel": cores}},
)
