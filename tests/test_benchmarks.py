"""The benchmarks: that one measures and judges, never how fast; and what `compare.py` catches."""

import argparse
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RATIOS = {
    "1 KiB: messages-paper ÷ MPI_Allreduce": (0.50, 0.60, 0.80),
    "1 MiB: messages-paper ÷ MPI_Allreduce": (0.50, 0.52, 0.55),
    "1 MiB: messages-late ÷ messages-paper": (1.00, 1.00, 1.00),
}
KIB, MIB, LATE = RATIOS


@pytest.fixture
def result(tmp_path):
    """Return a function that writes a result, with some ratios replaced, and returns its path."""

    def write(name, replaced=(), **contents):
        ratios = {**RATIOS, **dict(replaced)}
        ratios = {k: dict(zip(("low", "median", "high"), v)) for k, v in ratios.items() if v}
        contents = {"benchmark": "latency", "ranks": 4, "machine": {}, "ratios": ratios, **contents}
        (tmp_path / name).write_text(json.dumps(contents))
        return tmp_path / name

    return write


def compare(*arguments):
    command = [sys.executable, BENCHMARKS / "compare.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_a_result_has_not_regressed_from_itself(result):
    ended = compare(result("old"), result("old"))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert all(name in ended.stdout for name in RATIOS)


def test_a_regression_is_named(result):
    ended = compare(result("old"), result("new", {MIB: (0.70, 0.72, 0.75)}))
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[-1] == f"regressed: {MIB}"


@pytest.mark.parametrize(
    "name, values, says",
    [
        (MIB, (0.60, 0.64, 0.66), ""),  # by less than the tolerance
        (KIB, (0.75, 0.90, 1.10), "unclear"),  # by more, in rounds that differ as much
        (MIB, (0.20, 0.22, 0.25), ""),  # it is faster
    ],
)
def test_noise_is_no_regression(result, name, values, says):
    ended = compare(result("old"), result("new", {name: values}))
    assert ended.returncode == 0, ended.stdout
    line = next(line for line in ended.stdout.splitlines() if line.startswith(name))
    assert line.endswith(says or f"{values[1] / RATIOS[name][1]:.2f}")


def test_what_was_measured_once_has_no_noise_to_hide_in(result):
    assert compare(result("old"), result("new", {LATE: (1.3, 1.3, 1.3)})).returncode == 1


def test_the_tolerance_can_be_chosen(result):
    files = result("old"), result("new", {MIB: (0.70, 0.72, 0.75)})
    assert compare(*files, "--tolerance", "1.5").returncode == 0
    assert compare(*files, "--tolerance", "1.3").returncode == 1


def test_absolute_times_and_the_machine_do_not_count(result):
    old = result("old", machine={"cores": 2}, results=[{"microseconds": 1}])
    new = result("new", machine={"cores": 64}, results=[{"microseconds": 100}])
    ended = compare(old, new)
    assert ended.returncode == 0
    assert "cores differs: 2, 64" in ended.stdout


def test_ratios_of_one_file_alone_are_listed(result):
    ended = compare(result("old", {KIB: None}), result("new", {MIB: None}))
    assert ended.returncode == 0
    assert [line.split(": ", 1)[1] for line in ended.stdout.splitlines() if "only in" in line] == [
        MIB,
        KIB,
    ]


@pytest.mark.parametrize(
    "contents, complaint",
    [
        ({"benchmark": "memory"}, "benchmark differ: latency in"),
        ({"ranks": 2}, "ranks differ: 4 in"),
        ({"ratios": {}}, "has no ratios: latency measures none"),
        ({"ratios": {"another": {"low": 1, "median": 1, "high": 1}}}, "no ratio in common"),
        ({"ratios": {KIB: 1.0}}, "is no result of these benchmarks"),
        ({"ratios": {KIB: {"low": 1, "median": float("nan"), "high": 1}}}, "is no result"),
        ({"ratios": {KIB: {"low": 1, "median": 9, "high": 1}}}, "is no result"),
    ],
)
def test_files_that_cannot_be_compared(result, contents, complaint):
    ended = compare(result("old"), result("new", **contents))
    assert ended.returncode == 2
    assert ended.stderr.startswith("compare: ") and complaint in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["", "[]", "3", '{"machine": {}}'])
def test_files_that_are_no_results(result, tmp_path, text):
    (tmp_path / "new").write_text(text)
    ended = compare(result("old"), tmp_path / "new")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert str(tmp_path / "new") in ended.stderr


def test_a_file_that_is_missing(result, tmp_path):
    ended = compare(result("old"), tmp_path / "nowhere")
    assert ended.returncode == 2
    assert ended.stderr == f"compare: cannot read {tmp_path}/nowhere: No such file or directory\n"


@pytest.mark.launch
def test_latency_measures_what_it_says(mpirun, tmp_path):
    ended = mpirun(
        2,
        BENCHMARKS / "latency.py",
        *("--min-kib", 1024, "--max-kib", 1024, "--rounds", 2, "--seconds", 0.1),
        *("--results", tmp_path),
        timeout=60,
    ).check()
    contents = json.loads((tmp_path / "latency-2.json").read_text())
    assert contents["benchmark"] == "latency" and contents["ranks"] == 2
    assert contents["machine"]["cores"] >= 1 and contents["machine"]["mpi"]
    (row,) = contents["results"]
    assert row["bytes"] == 1 << 20 and row["rounds"] == 2
    columns = {"MPI_Allreduce", "MPI_Iallreduce", "memcpy"}
    for way in ("messages", "shared", "window"):
        columns |= {f"{way}-{kind}" for kind in ("paper", "conserving", "late")}
    assert columns <= set(row["microseconds"])
    assert all(value > 0 for value in row["microseconds"].values())
    # Figures are judged by the ratios, which are medians of those of the rounds.
    assert {"1 MiB: messages-paper ÷ MPI_Allreduce", "1 MiB: messages-paper ÷ memcpy"} <= set(
        contents["ratios"]
    )
    bounds = {figure["figure"]: figure["bound"] for figure in contents["figures"]}
    assert bounds["1 MiB: messages-paper ÷ MPI_Allreduce"] == 0.95
    assert bounds["1 MiB: window-paper ÷ MPI_Allreduce"] == 0.45
    assert bounds["1 MiB: messages-late ÷ messages-conserving"] == 1.3
    for figure in contents["figures"]:
        assert figure["value"] == contents["ratios"][figure["figure"]]["median"]
        assert figure["holds"] == (figure["value"] <= figure["bound"])
        assert f"{figure['figure']}: " in ended.stdout
    assert compare(*2 * [tmp_path / "latency-2.json"]).returncode == 0


@pytest.mark.launch
def test_group_calls_are_measured_with_protocols_in_python_too(mpirun, tmp_path):
    options = "--max-kib", 1, "--rounds", 1, "--seconds", 0.1, "--results", tmp_path
    mpirun(2, BENCHMARKS / "group_calls.py", *options, timeout=60).check()
    (row,) = json.loads((tmp_path / "group-calls-2.json").read_text())["results"]
    kinds = {name.split(",")[0] for name in row["microseconds"]}
    assert kinds == {"Allreduce", "ready", "triggered", "between", "planned", "formed"}


@pytest.mark.slow
def test_a_result_is_drawn_without_measuring(result, tmp_path):
    pytest.importorskip("matplotlib")
    sizes = [{"bytes": 1 << shift, "microseconds": {"MPI_Allreduce": 1}} for shift in (10, 20)]
    for row in sizes:
        row["microseconds"]["messages-paper"] = 2
    result("latency-4.json", results=sizes, machine={"cores": 2, "processor": "", "mpi": ""})
    command = [sys.executable, "-m", "benchmarks", "--plot", "--results", str(tmp_path), "latency"]
    subprocess.run(command, cwd=BENCHMARKS.parent, check=True, timeout=60)
    assert (tmp_path / "latency-4.png").read_bytes().startswith(b"\x89PNG")


def test_wp_sgd_s_page_shows_the_tables_of_its_result_file(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    wp_sgd = importlib.import_module("wp_sgd")
    results = json.loads((BENCHMARKS / "results" / "wp-sgd-1.json").read_text())["results"]
    page = (BENCHMARKS.parent / "docs" / "wp-sgd.md").read_text()
    tables = wp_sgd.tables(results)
    assert set(tables) > {"r", "samples", "seconds", "pairs", "nodes", "check"}
    assert [title for title, text in tables.items() if text not in page] == []


@pytest.fixture
def ablations(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("ablations")


def test_ablations_compare_each_row_with_wagma_under_the_same_rule(ablations):
    def runs(accuracy, rates):
        each = {"accuracy": accuracy, "bound_over_wall": 0.9, "timely_share": 0.2}
        return [{**each, "samples_per_s": rate} for rate in rates]

    for rule in ablations.RULES:
        assert list(ablations.labels(8, rule)) == list(ablations.PAPER)
    whole, other = runs(0.97, (100, 110, 90)), runs(0.95, (50, 44, 63))
    rows = {row: ablations.figures_of(other, whole) for row in ablations.PAPER}
    rows[ablations.WHOLE] = ablations.figures_of(whole, whole)
    table = ablations.table("τ = 10", dict.fromkeys(ablations.RULES, rows)).splitlines()
    assert len(table) == 2 + len(ablations.PAPER)
    assert {line.count("|") for line in table} == {9}
    assert table[2].startswith("| WAGMA | 97.0 ± 0.0 | 1.00 | 0.20 | 97.0 ± 0.0 |")
    assert table[3].startswith("| ❶ no groups: local SGD | 95.0 ± 0.0 | 0.50 |  | 95.0")
    assert table[4].startswith("| ❷ fixed groups | 95.0 ± 0.0 | 0.50 | 0.20 |")


def test_the_page_about_comparing_shows_the_tables_of_the_ablations_if_they_were_run(ablations):
    path = BENCHMARKS / "results" / "ablations-8.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    page = (BENCHMARKS.parent / "docs" / "comparing.md").read_text()
    assert [period for period, text in ablations.tables(results).items() if text not in page] == []


@pytest.fixture
def comparisons(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("comparisons")


def test_the_tables_of_the_comparisons_have_a_cell_for_each_method(comparisons):
    row = {"ratio": 1.5, "accuracies": [0.9672, 0.9728], "bound_over_wall": 0.95}
    row |= {"samples_per_s": 1814.2, "waiting_share": 0.117}
    rows = dict.fromkeys([*comparisons.METHODS.values(), *comparisons.UNEQUAL], row)
    delays = comparisons.table_of_delays(dict.fromkeys(comparisons.DELAYS, rows)).splitlines()
    assert len(delays) == 2 + len(comparisons.METHODS)
    assert delays[2] == "| Allreduce | 1.50 | 97.0 ± 0.4 | 0.95 | 1.50 | 97.0 ± 0.4 | 0.95 |"
    shards = comparisons.table_of_shards(dict.fromkeys(comparisons.SHARDS, rows)).splitlines()
    assert shards[2] == "| `local-sgd` | 97.0 ± 0.4 | 97.0 ± 0.4 | 1,814 | 12 % |"
    assert len(shards) == 2 + len(comparisons.UNEQUAL)
    rates = comparisons.table_of_rates({"0.05": rows}).splitlines()
    assert rates[2:] == ["| 0.05 | 97.0 ± 0.4 | 97.0 ± 0.4 |"]


def test_the_pages_show_the_tables_of_the_comparisons(comparisons):
    results = BENCHMARKS / "results"
    eight = json.loads((results / "comparisons-8.json").read_text())["results"]
    four = json.loads((results / "comparisons-4.json").read_text())["results"]
    docs = BENCHMARKS.parent / "docs"
    page = (docs / "comparing.md").read_text()
    assert comparisons.table_of_delays(eight["delays"]) in page
    assert comparisons.table_of_rates(eight["learning rates"]) in page
    assert comparisons.table_of_shards(four) in (docs / "unequal-work.md").read_text()


@pytest.fixture
def scaling_figures(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("scaling_figures")


def test_scaling_is_predicted_with_the_neighbors_of_the_paper_and_each_simulation_once(
    scaling_figures,
):
    neighbors = {name: case.neighbors for name, (case, _) in scaling_figures.SCALES.items()}
    assert neighbors == {"figure 4": 2, "figure 7": 1, "figure 10": 4}
    simulations = [
        (of.figure, of.ranks, of.method, str(of.change)) for of in scaling_figures.PUBLISHED
    ]
    assert len(set(simulations)) == len(simulations)


def test_the_page_of_the_simulation_shows_the_tables_of_the_scaling_figures(scaling_figures):
    path = BENCHMARKS / "results" / "scaling-figures-1.json"
    results = json.loads(path.read_text())["results"]
    page = (BENCHMARKS.parent / "docs" / "simulation.md").read_text()
    parameters = {name: each["neighbors"] for name, each in results["parameters"].items()}
    assert parameters == {"figure 4": 2, "figure 7": 1, "figure 10": 4}
    missing = [title for title, text in scaling_figures.tables(results).items() if text not in page]
    assert missing == []


def test_the_page_shows_the_bias_of_all_methods(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    learning_bias = importlib.import_module("learning_bias")
    results = json.loads((BENCHMARKS / "results" / "learning-bias-8.json").read_text())["results"]
    page = (BENCHMARKS.parent / "docs" / "own-pace.md").read_text()
    assert learning_bias.table(results) in page


@pytest.mark.parametrize(
    ("name", "file", "page"),
    [
        ("learning_shards", "learning-shards-8.json", "different-data.md"),
        ("learning_texts", "learning-texts-8.json", "different-data.md"),
        ("shards_cost", "shards-cost-4.json", "different-data.md"),
    ],
)
def test_the_page_about_different_data_shows_the_tables_of_the_results(
    monkeypatch, name, file, page
):
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module(name)
    results = json.loads((BENCHMARKS / "results" / file).read_text())["results"]
    text = (BENCHMARKS.parent / "docs" / page).read_text()
    if name != "learning_shards":
        assert benchmark.table(results) in text
        return
    for part, rows in results.items():
        for table in benchmark.tables(part, rows):
            assert table in text


def test_the_page_compares_simulated_trainings_with_measured_ones(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    learning_wall = importlib.import_module("learning_wall")
    files = {ranks: BENCHMARKS / "results" / f"learning-wall-{ranks}.json" for ranks in (4, 8)}
    results = {ranks: json.loads(file.read_text())["results"] for ranks, file in files.items()}
    page = (BENCHMARKS.parent / "docs" / "simulated-training.md").read_text()
    assert learning_wall.table(results) in page


FIGURES = sorted(path.stem for path in BENCHMARKS.glob("figure_*.py"))


@pytest.mark.parametrize("name", FIGURES)
def test_the_page_of_the_papers_figures_shows_the_tables_of_the_results(name, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    figure = importlib.import_module(name).FIGURE
    tables = importlib.import_module("learning_figures").tables
    path = BENCHMARKS / "results" / f"{figure.name}-{figure.ranks}.json"
    page = (BENCHMARKS.parent / "docs" / "papers.md").read_text()
    assert [
        text for text in tables(json.loads(path.read_text())["results"], figure) if text not in page
    ] == []
    assert f"(figures/{figure.name}.png)" in page
    assert (BENCHMARKS.parent / "docs" / "figures" / f"{figure.name}.png").exists()


def test_a_figure_s_table_counts_who_reached_the_target(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    figures = importlib.import_module("learning_figures")

    def result(*points):
        return {
            "accuracy": points[-1][2],
            "samples_per_s": 10.0,
            "points": [(at, accuracy) for at, _, accuracy in points],
            "steps": [steps for _, steps, _ in points],
            "ranks": 4,
        }

    fast = result((1.0, 10, 0.5), (2.0, 20, 0.95))
    slow = result((1.0, 5, 0.5), (2.0, 10, 0.92))
    never = result((1.0, 5, 0.5), (2.0, 10, 0.8))
    of = figures.figures([fast, slow, slow], 0.9, 2)
    assert (of["target_s"], of["target_steps"], of["updates"], of["reached"]) == (2.0, 10, 20, 3)
    assert of["curve"]["seconds"] == [1.0, 2.0]
    assert of["curve"]["accuracy"][1] == pytest.approx(0.93)
    rarely = figures.figures([fast, never, never], 0.9, 2)
    assert (rarely["target_s"], rarely["updates"], rarely["reached"]) == (None, None, 1)
    text = figures.table("case", {"one": of, "other": rarely}, 0.9)
    assert "| one | 1.00 | 2 ± 0 | 1.00 | 10 | 20 | 0.100 | 93.0 ± 1.7 |" in text
    assert "| other | 1.00 | – (1 of 3) | – | – | – | – | 85.0 ± 8.7 |" in text


def test_the_results_readme_counts_the_figures_that_meet_their_targets():
    files = (BENCHMARKS / "results").glob("*.json")
    figures = [each for file in files for each in json.loads(file.read_text()).get("figures", [])]
    met = sum(each["holds"] for each in figures)
    readme = " ".join((BENCHMARKS / "results" / "README.md").read_text().split())
    assert f"{met} figures meet their targets, {len(figures) - met} do not" in readme


def test_optimizers_whose_package_is_missing_are_skipped(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("other_optimizers")
    monkeypatch.setitem(module.OPTIMIZERS, "none", module.of("no_such_package", "None"))
    measured = module.measure(None, "none", 1)
    assert measured["skipped"].startswith("ModuleNotFoundError") and len(measured) == 2


def test_the_page_about_optimizers_names_the_packages_of_the_results():
    page = (BENCHMARKS.parent / "docs" / "optimizers.md").read_text()
    found = json.loads((BENCHMARKS / "results" / "other-optimizers-4.json").read_text())["results"]
    named = {f"{of['package']} {of['version']}" for of in found.values()}
    assert {name for name in named if name not in page and not name.startswith("torch ")} == set()


@pytest.fixture
def workloads(monkeypatch):
    for name in ("gymnasium", "sacrebleu", "sentencepiece"):
        pytest.importorskip(name)
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("workloads")


def test_the_page_about_workloads_shows_the_tables_of_the_results(workloads):
    page = (BENCHMARKS.parent / "docs" / "workloads.md").read_text()
    files = (BENCHMARKS / "results").glob("workloads-[0-9]*.json")
    found = {of["ranks"]: of for of in (json.loads(each.read_text()) for each in files)}
    assert workloads.table_of_times(found.pop(workloads.RECORDED)["results"]) in page
    assert found
    by_time = (BENCHMARKS / "results").glob("workloads-wall-*.json")
    for of in [*found.values(), *(json.loads(each.read_text()) for each in by_time)]:
        for name in of["results"]:
            assert workloads.table(name, of["ranks"], of["results"]) in page


def test_a_line_through_step_times_has_small_relative_residuals(workloads):
    of = workloads.described(workloads.Timed([1.0, 2.0, 3.0, 10.0], [5.0, 7.0, 9.0, 23.0]))
    line = of["base_s"], of["per_work_s"], of["residual"]
    assert line == pytest.approx((3.0, 2.0, 0.0), abs=1e-9)
    assert (of["median_s"], of["most"]) == (8.0, 23 / 8)
    slowest = list(of["slowest"].values())
    assert slowest == sorted(slowest) and slowest[0] > 1 and slowest[-1] == pytest.approx(23 / 11)


def test_a_step_that_plays_a_rollout_takes_the_time_of_both(workloads):
    lines = ("step", 0.25, 2.0), ("rollout", 10.0, 100.0)
    task, base = workloads.prepared("control", lines)
    batches, policy = iter(task.data(0, 1, 4, 0)[0]), task.model()
    first, second = next(batches), next(batches)
    for each in (first, second):
        task.loss(policy, each)
    assert base == 0.25
    assert task.work(first) == 2 * first.shape[0] + 10 + 100 * first.played
    assert task.work(second) == 2 * second.shape[0]


def test_the_parts_of_steps_are_recorded_with_their_work(workloads):
    of = workloads.WORKLOADS["control"]
    steps = 17 - workloads.WARM_UP
    parts = workloads.record(of.task(), 4, steps)
    assert len(parts["step"].seconds) == len(parts["step"].work) == steps
    assert len(parts["rollout"].work) == 1 and min(parts["rollout"].seconds) > 0


def test_a_spread_of_values_of_which_one_is_lost_is_not_a_number(workloads):
    assert workloads.spread([1.0, 2.0, 3.0], 1) == "2.0 ± 1.0"
    assert workloads.spread([1.0, 2.0, math.inf], 1) == "2.0 ± nan"
    assert workloads.spread([1.0], 1) == "1.0"


def run_of(workloads, *losses, rate=1.0):
    seconds = [float(place) for place in range(1, len(losses) + 1)]
    bleu = [10 * (3 - each) for each in losses]
    values = {"seconds": seconds, "loss": list(losses), "bleu": bleu}
    return {"samples_per_s": rate, "computing": 0.5, "steps": 9, "took_s": 0, **values}


def test_the_time_to_a_target_lies_between_two_evaluations(workloads):
    run = run_of(workloads, 3.0, 2.0, 1.0)
    assert workloads.time_to(run, "loss", 1.25, rising=False) == pytest.approx(2.75)
    assert workloads.time_to(run, "loss", 3.0, rising=False) == 1.0
    assert workloads.time_to(run, "bleu", 5.0, rising=True) == pytest.approx(1.5)
    assert workloads.time_to(run, "bleu", 21.0, rising=True) == float("inf")
    falling_back = run_of(workloads, 3.0, 1.0, 2.0, 1.0, 1.0)
    assert workloads.time_to(falling_back, "loss", 1.5, rising=False) == pytest.approx(3.5)


def test_a_target_that_the_first_evaluation_has_reached_was_reached_by_then(workloads):
    assert workloads.cells_of_times([2.0, 2.0, 5.0], [1.0, 1.5, 2.0], 2.0)[0] == "≤ 2.00 ± 1.73"
    assert workloads.cells_of_times([2.5, 3.0, 5.0], [1.0, 1.5, 2.0], 2.0)[0] == "3.00 ± 1.32"


def test_the_table_of_a_workload_divides_by_the_first_method_with_the_same_seed(workloads):
    slow, fast = run_of(workloads, 2.6, 0.5), run_of(workloads, 0.6, 0.5, rate=3.0)
    never = run_of(workloads, 2.0, 2.0)
    runs = {
        "Allreduce": {"0": slow, "1": {**slow, "samples_per_s": 2.0}},
        "WAGMA": {"0": fast, "1": fast},
        "SGP": {"0": slow, "1": never},
        "AD-PSGD": {"1": never},
    }
    lines = workloads.table("translation", 4, {"translation": {"runs": runs}}).splitlines()
    assert lines[0].startswith("| 4 ranks, 2 seeds | throughput, ÷ | computing | s to loss 0.6 |")
    assert lines[2].startswith("| Allreduce | 1.00 ± 0.00 | 50 % | 1.95 ± 0.00 | 1.00 |")
    assert lines[3].startswith("| WAGMA | 2.25 ± 1.06 | 50 % | ≤ 1.00 ± 0.00 | 1.95 |")
    assert "| – (1 of 2) | – |" in lines[4]
    assert lines[5].startswith("| AD-PSGD (1 of 2) | 0.50 | 50 % | – (0 of 1) | – |")


def test_trainings_that_are_written_are_not_made_again(workloads, monkeypatch, tmp_path):
    made = []

    def train_one(name, lines, ranks, method, seed):
        made.append((ranks, method, seed))
        return run_of(workloads, 2.0, 1.0)

    monkeypatch.setattr(workloads, "train_one", train_one)
    arguments = argparse.Namespace(
        results=tmp_path, tasks=["translation"], ranks=[4], seeds=2, methods=["WAGMA", "Allreduce"]
    )
    line = {"base_s": 1.0, "per_work_s": 2.0}
    recorded = {"translation": {"trained": {"step": line}}}
    (tmp_path / "workloads-1.json").write_text(json.dumps({"results": recorded}))
    workloads.train_all(arguments)
    assert made == [(4, method, seed) for seed in (0, 1) for method in ("WAGMA", "Allreduce")]
    workloads.train_all(arguments)
    assert len(made) == 4
    runs = workloads.read(arguments, 4)["translation"]["runs"]
    assert [*runs] == ["Allreduce", "WAGMA"] and [*runs["WAGMA"]] == ["0", "1"]
    line["base_s"] = 1.5
    (tmp_path / "workloads-1.json").write_text(json.dumps({"results": recorded}))
    workloads.train_all(arguments)
    assert len(made) == 8


@pytest.fixture
def by_time(workloads):
    return importlib.import_module("workloads_wall")


def test_trainings_by_time_take_longer_by_what_their_batches_have_cost_on_a_core_alone(by_time):
    recorded = {"translation": {"trained": {"step": {"base_s": 2e-3, "per_work_s": 1e-5}}}}
    assert by_time.settings_of("translation", 4, recorded) == {
        "batch_size": 8, "seconds": 18.0, "step_time_ms": 24.0, "step_time_per_work_ms": 0.12
    }  # fmt: skip
    assert by_time.settings_of("control", 4, recorded) == by_time.EPISODES


def test_by_time_the_methods_that_are_missing_with_a_seed_are_trained_in_one_job(
    by_time, workloads, monkeypatch, tmp_path, capsys
):
    made = []

    def train_seed(name, settings, ranks, methods, seed):
        made.append((name, ranks, methods, seed))
        shares = {"processor": 0.1, "queued": 0.02, "longer": 0.03}
        return {method: run_of(workloads, 2.0, 0.5) | shares for method in methods}

    def run(*words):
        words = ["--ranks", "4", "--tasks", "translation", "--results", str(tmp_path), *words]
        monkeypatch.setattr(sys, "argv", ["workloads_wall.py", *words])
        by_time.main()
        return capsys.readouterr().out

    step = {"base_s": 2e-3, "per_work_s": 1e-5}
    recorded = {"results": {"translation": {"trained": {"step": step}}}}
    (tmp_path / "workloads-1.json").write_text(json.dumps(recorded))
    monkeypatch.setattr(by_time, "train_seed", train_seed)
    monkeypatch.setattr(by_time, "METHODS", ["WAGMA", "Allreduce", "AD-PSGD"])
    run("--seeds", "1", "--methods", "WAGMA", "Allreduce")
    printed = run("--seeds", "2")
    assert [each[2:] for each in made] == [
        (["WAGMA", "Allreduce"], 0),
        (["AD-PSGD"], 0),
        (["WAGMA", "Allreduce", "AD-PSGD"], 1),
    ]
    assert "| AD-PSGD | 1.00 ± 0.00 |" in printed
    assert printed.endswith(
        "\ncomputation is 10 % of the ranks' own time, waiting for a core 2.0 %, steps take 3.0 % "
        "longer than their work should\n"
    )
    step["base_s"] = 3e-3
    (tmp_path / "workloads-1.json").write_text(json.dumps(recorded))
    run("--seeds", "1", "--methods", "Allreduce")
    assert made[3:] == [("translation", 4, ["Allreduce"], 0)]


def test_what_was_not_sleep_is_a_part_of_the_ranks_own_time(by_time, tmp_path):
    record = {"compute_s": 0.5, "cpu_s": 0.05, "queued_s": 0.01, "work": 20}
    for rank, extra in enumerate((0.0, 0.1)):
        lines = [json.dumps(record | {"compute_s": 0.5 + extra}) + "\n"] * 2
        (tmp_path / f"rank-{rank:04}.jsonl").write_text("".join(lines))
    settings = {"step_time_ms": 100.0, "step_time_per_work_ms": 20.0}
    shares = by_time.shares_of(tmp_path, settings)
    assert shares == pytest.approx({"processor": 0.2 / 2.2, "queued": 0.04 / 2.2, "longer": 0.1})
    assert by_time.shares_of(tmp_path, {}).keys() == {"processor", "queued"}


def test_the_script_of_trainings_by_time_has_the_workload_s_functions(workloads, monkeypatch):
    monkeypatch.setenv("WORKLOAD", "language")
    script = importlib.import_module("workload_script")
    assert script.data is script.task.data and script.task.name == "language"
    batch = next(iter(script.data(0, 4, 4, 0)[0]))
    assert script.work(batch) > 0 and script.loss(script.model(), batch).requires_grad
