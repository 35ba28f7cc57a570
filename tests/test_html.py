"""The HTML pages: what is in them, and how a browser shows them."""

import html.parser
import importlib.util
import json
import math
import re
import shutil

import numpy as np
import pytest
from recorded import append, record, write

from wagma import cli
from wagma.html import charts, comparison, run

jinja2 = pytest.importorskip("jinja2")
vl_convert = pytest.importorskip("vl_convert")

MOST_BYTES = 5_000_000
# What a plot draws, without its axes and legends.
MARKS = [
    f".role-mark.mark-{kind} {shape}"
    for kind, shape in (("line", "path"), ("rect", "path"), ("symbol", "path"), ("rule", "line"))
]


def summary(ranks):
    use = {"compute": 4.0, "delay": 0.0, "waiting": 5.0, "communicating": 0.5, "other": 0.5}
    return {
        "metrics": ["accuracy"],
        "accuracy": 0.9,
        "wall_s": 10.0,
        "samples_per_s": 512.0,
        "timely_share": 0.5,
        "mean_staleness": 0.5,
        "staleness_of_rank": ranks * [[30, 8, 2]],
        "seconds_of_rank": ranks * [use],
        "evaluations": [{"step": 10 * n, "elapsed_s": n, "accuracy": n / 10} for n in (1, 5, 9)],
    }


def finished(directory, own=(0.1, 0.1, 0.2, 0.1), steps=40):
    """Write a run that has ended, in which every third average is late."""
    write(directory, own, steps=0, versions={"wagma": "1.0</script><b>"})
    for rank, seconds in enumerate(own):
        late = {step: {"timely": step % 3 > 0} for step in range(steps)}
        records = [record(step, seconds, 0.25 - seconds, **late[step]) for step in range(steps)]
        append(directory, rank, records)
    (directory / "summary.json").write_text(json.dumps(summary(len(own))))
    return directory


def compared(directory):
    """Write a comparison of two methods with two seeds."""
    directory.mkdir()
    results = {}
    runs = {"allreduce": [], "wagma:group_size=2": []}
    for number, (label, of) in enumerate(runs.items()):
        for seed in range(2):
            place = directory / f"seed-{seed}"
            place.mkdir(exist_ok=True)
            each = finished(place / label.replace(":", ","), (0.1, 0.2))
            point = {"samples_per_s": 400.0 + 100 * number + 20 * seed, "bound_s": 9.0}
            of.append({**summary(2), **point, "directory": str(each.relative_to(directory))})
        results[label] = {
            "samples_per_s": 410.0,
            "ratio": 1.0,
            "bound_ratio": 1.0,
            "bound_over_wall": 0.9,
            "target_s": None,
            "metric": "accuracy",
            "mean": 0.9,
            "deviation": 0.01,
            "waiting_share": 0.5,
            "mean_staleness": None,
            "bytes_sent": 1e6,
        }
    settings = {"steps": 40, "seconds": None, "target": 0.8, "algorithms": list(runs)}
    record = {"settings": settings, "ranks": 2, "results": results, "runs": runs}
    (directory / "comparison.json").write_text(json.dumps(record))
    return directory


def simulated(directory, sizes=(4, 16)):
    """Write a simulation of two methods."""
    directory.mkdir()
    results = {
        label: [
            {
                "ranks": size,
                "wall_s": 10.0,
                "steps_per_s": factor * size,
                "idle_share": 0.3 / factor,
                "timely_share": 0.5,
                "staleness": [5, 3, 0] if label == "wagma" else [0],
            }
            for size in sizes
        ]
        for label, factor in (("allreduce", 1.0), ("wagma", 1.5))
    }
    record = {"settings": {"steps": 10}, "machine": {"latency": 1e-6}, "results": results}
    (directory / "simulation.json").write_text(json.dumps(record))
    return directory


KINDS = {"run": finished, "comparison": compared, "simulation": simulated}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return the page of a directory of each kind, as the command makes it."""
    made = {}
    for kind, make in KINDS.items():
        directory = make(tmp_path_factory.mktemp("pages") / kind)
        assert cli.main(["report", str(directory), "--html"]) == 0
        made[kind] = directory / "report.html"
    return made


class Parsed(html.parser.HTMLParser):
    """The elements of a page, and what they would load."""

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.plots, self.text = [], [], 0, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        self.loads += [given[each] for each in ("src", "href") if each in given]
        self.plots += given.get("class") == "plot"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_one_small_file_that_loads_nothing(pages, kind):
    text = pages[kind].read_text()
    assert len(text.encode()) < MOST_BYTES
    parsed = Parsed(text)
    assert parsed.open == [] and parsed.loads == ["data:,"]
    assert parsed.plots == len(specifications(text)) > 2
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text


def specifications(text):
    """Return a page's specifications."""
    return json.loads(re.search(r"^const specs = (.*);$", text, re.MULTILINE)[1])


@pytest.mark.parametrize("kind", KINDS)
def test_every_plot_has_marks(pages, kind):
    for spec in specifications(pages[kind].read_text()):
        drawn = vl_convert.vegalite_to_svg(spec | {"width": 400})
        groups = re.findall(r'class="mark-\w+ role-mark[^>]*>(<\w+)', drawn)
        assert groups and {*groups} <= {"<path", "<line"}, spec


def test_the_page_of_a_run_says_who_is_slow_and_what_the_run_was(pages):
    words = " ".join(" ".join(Parsed(pages["run"].read_text()).text).split())
    assert "rank 2 took 2.0 × the others' median in 100 % of steps" in words
    for said in ("test accuracy 90.00%", "wall time 10 s", "1.0</script><b>", "wagma, 4 ranks"):
        assert said in words


@pytest.mark.parametrize(
    "make, file, content, error",
    [
        (compared, "comparison.json", '{"settings":', "is damaged"),
        (compared, "comparison.json", "[]", "is damaged"),
        (compared, "comparison.json", '{"settings": {"steps": 1}, "results": {}}', "is damaged"),
        (simulated, "simulation.json", '{"settings": {"steps": 1}, "results": {}}', "no results"),
        (compared, "seed-0/allreduce/rank-0001.jsonl", '{"step": 1}\n', "line 1: no record"),
        (compared, "seed-0/allreduce/rank-0001.jsonl", None, "Is a directory"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(tmp_path, capsys, make, file, content, error):
    directory = make(tmp_path / "made")
    (directory / file).unlink()
    if content is None:
        (directory / file).mkdir()
    else:
        (directory / file).write_text(content)
    assert cli.main(["report", str(directory), "--html"]) == 2
    said = capsys.readouterr().err
    assert str(directory / file) in said and error in said and said.count("\n") == 1


def test_a_run_that_has_not_ended_has_a_page(tmp_path, capsys):
    directory = write(tmp_path / "a", [0.1, 0.1])
    with (directory / "rank-0001.jsonl").open("a") as file:
        file.write('{"step": ')
    assert cli.main(["report", str(directory), "--html"]) == 0
    assert capsys.readouterr().out.endswith(f"report is in {directory / 'report.html'}\n")
    text = " ".join(Parsed((directory / "report.html").read_text()).text)
    assert "not ended, or stopped" in text


def test_results_that_are_not_finite_have_a_page(tmp_path):
    """JSON has null for them: of all evaluations, and of the last one."""
    for name, known in (("none", 0), ("some", 2)):
        directory = finished(tmp_path / name)
        of = summary(4) | {"accuracy": None}
        for each in of["evaluations"][known:]:
            each["accuracy"] = None
        (directory / "summary.json").write_text(json.dumps(of))
        assert cli.main(["report", str(directory), "--html"]) == 0
        made = run.page(directory, None)
        assert ("–", "test accuracy") in made.figures
        plots = [each for each in made.sections[0].charts if each.title.startswith("accuracy")]
        assert len(plots) == (2 if known else 0)


def test_a_comparison_with_results_that_are_not_finite_has_a_page(tmp_path):
    directory = compared(tmp_path / "a")
    of = json.loads((directory / "comparison.json").read_text())
    of["results"]["allreduce"]["mean"] = None
    for each in of["runs"]["allreduce"]:
        each["accuracy"] = None
        each["evaluations"][-1]["accuracy"] = None
    (directory / "comparison.json").write_text(json.dumps(of))
    assert cli.main(["report", str(directory), "--html"]) == 0
    spec = comparison.page(directory).sections[1].charts[0].spec
    assert values(spec)["y"] == ("10", "50", "nan", "10", "50", "90")


def test_a_directory_of_neither_kind_and_a_missing_package_are_one_line(
    tmp_path, capsys, monkeypatch
):
    assert cli.main(["report", str(tmp_path), "--html"]) == 2
    assert f"{tmp_path} has no rank-*.jsonl and no comparison.json" in capsys.readouterr().err
    found = importlib.util.find_spec
    hidden = {"vl_convert": None}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: hidden.get(name, found) and found(name)
    )
    assert cli.main(["report", str(tmp_path), "--html"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "vl-convert-python not installed: pip install 'wagma[html]'" in error


def values(spec):
    """Return a plot's data: its columns by name."""
    heading, *rows = spec["data"]["values"].split("\n")
    return dict(zip(heading.split(","), zip(*(row.split(",") for row in rows))))


def test_a_curve_has_the_means_of_a_rank_s_losses(tmp_path):
    spec = run.training_metric(
        run.read(finished(tmp_path / "a", (0.1, 0.2), steps=1000)), "loss", by_time=False
    )
    data = values(spec)
    assert len(data["y"]) == 2 * run.POINTS
    assert float(data["x"][0]) == 4 and float(data["y"][0]) == pytest.approx(2 - 0.015)
    assert {*data["rank"]} == {'"rank 0"', '"rank 1"'}


def test_what_a_task_has_added_to_records_is_drawn_over_time(tmp_path):
    made = write(tmp_path / "a", [0.1], steps=0, recorded=["training_return"])
    for step in range(40):
        value = None if step < 20 else 10.0 + step
        append(made, 0, [record(step, training_return=value)])
    charts = {chart.title: chart for chart in run.learning(run.read(made))}
    data = values(charts["training return over time"].spec)
    assert {float(each) for each in data["y"]} == {10.0 + step for step in range(20, 40)}
    assert min(map(float, data["x"])) > 20 * 0.12
    silent = write(tmp_path / "b", [0.1], recorded=["training_return"])
    assert len(run.learning(run.read(silent))) == 2


def test_many_ranks_are_drawn_as_a_band(tmp_path):
    made = run.read(finished(tmp_path / "a", 40 * (0.1,)))
    data = values(run.training_metric(made, "loss", by_time=True))
    assert len(data["y"]) == 40 and {*data} == {"x", "y", "low", "high"}


def test_losses_that_json_lacks_leave_gaps():
    edges = np.array([0.0, 2.0, 4.0, 6.0])
    means = run.binned(np.arange(1.0, 7), np.array([1, 3, math.nan, math.nan, 5, math.nan]), edges)
    np.testing.assert_equal(means, [2, math.nan, 5])


def test_what_lies_after_the_last_edge_is_left_out():
    """Ranks at their own pace make more steps than the slowest, to which they are compared."""
    means = run.binned(np.arange(1.0, 9), np.arange(8.0), np.array([0.0, 2.0, 4.0]))
    np.testing.assert_equal(means, [0.5, 2.5])


def test_the_heat_map_has_the_slowest_of_ranks_that_share_a_row(tmp_path):
    own = 2 * run.ROWS * [0.1]
    own[7] = 0.2
    spec, note = run.step_times(run.read(finished(tmp_path / "a", own, steps=4)))
    data = values(spec)
    assert "2 ranks in each row, of which the slowest is shown" in note
    rows = {int(rank): float(ms) for rank, ms in zip(data["rank"], data["ms"])}
    assert len(rows) == run.ROWS and rows[6] == 200 and rows[4] == 100
    assert {*data["last"]} == {str(rank) for rank in range(1, len(own), 2)}


@pytest.mark.parametrize(("ranks", "steps"), [(1, 10**5), (64, 10**4), (1000, 10)])
def test_a_heat_map_is_bounded(ranks, steps):
    columns = {name: np.full(steps, 0.1) for name in ("compute_s", "delay_s")}
    made = run.Run(None, {}, {}, dict.fromkeys(range(ranks), columns))
    spec, _ = run.step_times(made)
    assert len(values(spec)["ms"]) <= run.CELLS + run.ROWS


def test_bands_are_over_the_seeds():
    spec = comparison.banded(
        {"wagma": [[(1, 10), (2, 20)], [(1, 12), (2, 26)]], "sgp": [[(1, 5)], []]},
        ("x", "s"),
        ("y", "%"),
    )
    data = values(spec)
    assert data["low"][:2] == ("10", "20") and data["high"][:2] == ("12", "26")
    assert data["y"] == ("11", "23", "5")


def test_labels_of_one_method_have_different_colors():
    colors = comparison.colors_of(["wagma", "wagma:pace=own", "allreduce", "sgp"])
    assert len({*colors.values()}) == 4 and colors["allreduce"] == "currentColor"


def test_names_with_commas_and_quotes_are_data():
    assert charts.cell('a,"b"') == '"a,""b"""'
    assert [charts.cell(each) for each in (1.23456, 12345.0, 0.5, 12345.6)] == [
        *("1.235", "12345", "0.5", "1.235e+04")
    ]


# --- In a browser


@pytest.fixture(scope="module")
def browser():
    """Return a browser without windows: the system's Chromium, or playwright's."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with playwright.sync_playwright() as started:
        try:
            launched = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield launched
        launched.close()


WIDTH_FITS = """() => [...document.querySelectorAll(".plot")].every(
    (plot) => Math.abs(plot.querySelector("svg").clientWidth - plot.clientWidth) <= 2
)"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_browser_shows_all_plots_at_any_width(pages, browser, kind, scheme):
    """Without an error or a warning, and without any request."""
    said, requested = [], []
    context = browser.new_context(color_scheme=scheme, viewport={"width": 400, "height": 900})
    shown = context.new_page()
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.on("request", lambda request: requested.append(request.url))
    shown.goto(pages[kind].as_uri())
    shown.wait_for_selector("html[data-plots]")
    for width in (400, 1000, 1600):
        shown.set_viewport_size({"width": width, "height": 900})
        shown.wait_for_function(WIDTH_FITS)
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
        count = (
            f"(plots) => plots.map((plot) => plot.querySelectorAll({', '.join(MARKS)!r}).length)"
        )
        drawn = shown.eval_on_selector_all(".plot", count)
        assert len(drawn) > 2 and all(drawn), drawn
    background = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    text = shown.evaluate("getComputedStyle(document.querySelector('.plot text')).fill")
    assert text == shown.evaluate("getComputedStyle(document.body).color")
    context.close()
    assert said == [] and requested == [pages[kind].as_uri()]
