"""The folder for a machine with a GPU: what is in it, and what measure.py says where it cannot run.

`python tools/gpu_bundle.py FOLDER --rehearse` makes one and runs it on the driver's stand-in.
"""

import importlib
import platform
import subprocess
import sys
from pathlib import Path

import device_passes
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bundle(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("gpu_bundle")


def test_it_has_what_the_benchmark_looks_for(bundle):
    """Of what its tests import; and the MPI's packages are never those of the machine."""
    preflight = importlib.import_module("gpu_preflight")
    ours = {name.replace("-", "_") for name in bundle.OURS}
    names = {bundle.name_of(each).replace("-", "_") for each in bundle.needed()}
    assert set(preflight.OF_TESTS) <= ours | names
    assert {*ours, "wagma"} == set(bundle.gpu_measure.OURS)
    assert "mpi4py" not in names and "numpy" in names


def test_a_folder_that_is_too_large_names_its_largest_files(bundle, tmp_path):
    (tmp_path / "wheels").mkdir()
    with open(tmp_path / "wheels" / "large.whl", "wb") as file:
        file.truncate(bundle.MOST)  # takes no space
    (tmp_path / "small").write_text("small")
    with pytest.raises(SystemExit, match=r"has 64 MiB, .* \(wheels/large.whl: 64, small: 0\)"):
        bundle.check_size(tmp_path)


def test_measure_says_which_python_the_folder_is_for(bundle):
    here = {"python": ".".join(platform.python_version_tuple()[:2]), "machine": platform.machine()}
    bundle.gpu_measure.check(here)
    for what, other in (("python", "3.1"), ("machine", "vax")):
        with pytest.raises(bundle.gpu_measure.NotPossible, match=f"is for {what} {other}, and"):
            bundle.gpu_measure.check({**here, what: other})


def test_packages_on_the_path_come_after_those_of_the_folder(bundle, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{tmp_path / 'missing'}:")
    folders = bundle.gpu_measure.sites()
    assert folders[0] == str(tmp_path) and str(tmp_path / "missing") not in folders
    assert any(Path(folder, "pytest").is_dir() for folder in folders)
    assert "PYTHONPATH" in bundle.gpu_measure.UNSET


def test_measure_shows_what_failed(bundle):
    failing = [sys.executable, "-c", "raise SystemExit('no wheel')"]
    with pytest.raises(bundle.gpu_measure.NotPossible, match="no wheel\n.* failed"):
        bundle.gpu_measure.run(failing)


def test_tests_find_the_packages_that_are_installed(bundle, tmp_path):
    for name in ("first", "second"):  # links of an earlier run are replaced
        (tmp_path / name / "collectives").mkdir(parents=True)
        bundle.gpu_measure.link(tmp_path, tmp_path / name)
    assert (tmp_path / "collectives").resolve() == tmp_path / "second" / "collectives"


def test_what_was_built_for_the_tests_needs_no_compiler_any_more(monkeypatch):
    built = device_passes.module()
    monkeypatch.setenv("CC", "no-compiler")
    assert device_passes.module() == built


def test_measure_alone_says_what_it_does(tmp_path):
    script = tmp_path / "measure.py"
    script.write_text((ROOT / "tools" / "gpu_measure.py").read_text())
    ended = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
    assert ended.returncode == 0 and "python3 measure.py --check" in ended.stdout
