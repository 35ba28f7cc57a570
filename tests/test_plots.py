"""The plots: what is drawn of which numbers."""

import importlib.util
import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest

from wagma import plots
from wagma.methods import METHODS, REFERENCES, Method, named
from wagma.runs import Tally
from wagma.simulation import MACHINES, Settings, simulate, steps

MAJORITY = "eager-sgd:trigger=majority"
AVERAGING = {"left_out": 0, "waiting": 0.3, "communicating": 0.1, "bytes_sent": 0, "staleness": ()}


def tallies(ranks, steps=80, losses=lambda rank, step: 1 / (step + 1)):
    made = []
    for rank in range(ranks):
        tally = Tally(steps)
        for step in range(steps):
            tally.add(
                {
                    "compute_s": 0.01,
                    "delay_s": 0.001 * rank,
                    "elapsed_s": 0.02 * (step + 1),
                    "loss": losses(rank, step),
                    "samples": 8,
                    "timely": True,
                    "synchronized": False,
                }
            )
        tally.add_averaging(SimpleNamespace(**AVERAGING))
        made.append(tally)
    return made


@pytest.fixture
def figures(monkeypatch):
    """Collect the figures that are saved."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    saved = {}
    save = figure.savefig

    def collect(self, path):
        saved[path.name] = self
        save(self, path)

    monkeypatch.setattr(figure, "savefig", collect)
    return saved


def legend(axes_or_figure):
    legends = getattr(axes_or_figure, "legends", None) or [axes_or_figure.get_legend()]
    return [text.get_text() for text in legends[0].get_texts()]


def test_the_bars_of_a_rank_are_its_seconds(figures, tmp_path):
    plots.draw(tmp_path, tallies(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "time.png"]
    figure = figures["time.png"]
    (axes,) = figure.axes
    assert legend(figure) == ["compute", "injected delay", "wait", "communication", "other"]
    ends = [[bar.get_x() + bar.get_width() for bar in bars] for bars in axes.containers]
    assert np.allclose(ends[0], 0.8)
    assert np.allclose(np.subtract(ends[1], ends[0]), [0, 0.08, 0.16])
    assert np.allclose(np.subtract(ends[2], ends[1]), 0.3)
    assert np.allclose(np.subtract(ends[3], ends[2]), 0.1)
    assert np.allclose(ends[4], 1.6)


def test_what_took_no_time_has_no_bar(figures, tmp_path):
    plots.draw(tmp_path, tallies(1))
    assert legend(figures["time.png"]) == ["compute", "wait", "communication", "other"]


def test_every_rank_s_loss_and_the_mean_are_drawn_over_steps_and_time(figures, tmp_path):
    plots.draw(tmp_path, tallies(2, losses=lambda rank, step: 1.0 + 2 * rank))
    over_steps, over_time = figures["loss.png"].axes
    assert legend(figures["loss.png"]) == ["rank 0", "rank 1", "mean"]
    for axes, last in ((over_steps, 80), (over_time, 1.6)):
        first, second, mean = axes.get_lines()
        assert set(first.get_ydata()) == {1}
        assert set(second.get_ydata()) == {3}
        assert np.allclose(mean.get_ydata(), 2)
        assert mean.get_xdata()[-1] == pytest.approx(last)


@pytest.mark.parametrize("ranks", [1, 40])
@pytest.mark.parametrize("loss", [math.nan, 0.0, -1.0])
def test_odd_losses_and_many_ranks_are_drawn_as_well(figures, tmp_path, ranks, loss):
    plots.draw(tmp_path, tallies(ranks, 1 if ranks == 1 else 3, lambda rank, step: loss))
    figure = figures["loss.png"]
    assert not any(map(covers_data, figure.axes))
    assert legend(figure)[0] == ("rank 0" if ranks == 1 else "each rank")


def test_without_matplotlib_one_line_says_so(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        plots.draw(tmp_path, tallies(1))
    assert caplog.messages == ["no loss.png and time.png: matplotlib is not installed"]
    assert not list(tmp_path.iterdir())


# --- what is common to comparisons and simulations


def test_every_method_has_a_color_of_its_own_which_its_variants_share():
    names = [*METHODS, *REFERENCES]
    assert len({Method.color, *map(plots.color_of, names)}) == len(names) + 1
    assert plots.color_of("wagma:group_size=2") == METHODS["wagma"].color


def test_variants_of_one_method_differ_in_line_or_marker_for_as_long_as_they_can():
    labels = [f"wagma:group_size={size}" for size in range(1, 13)]
    styles = plots.styles(["sgp", *labels])
    assert styles["sgp"]["linestyle"] == styles[labels[0]]["linestyle"] == "-"
    assert len({tuple(styles[label].items()) for label in labels}) == len(labels)


def test_a_long_label_is_broken_after_colons_and_stays_what_was_given():
    label = "wagma:group_size=2:sync_period=10:late=paper:wait=group:transport=messages"
    lines = plots.wrapped(label).split("\n")
    assert "".join(lines) == label
    assert all(line.endswith(":") for line in lines[:-1])
    assert max(map(len, lines)) <= plots.LABEL_WIDTH
    assert plots.wrapped("post-local-sgd:sync_period=5") == "post-local-sgd:sync_period=5"


def words(figure):
    """Return every text of a figure's titles, axes and legends."""
    found = [figure.get_suptitle(), *(legend(figure) if figure.legends else ())]
    for axes in figure.axes:
        found += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        found += [tick.get_text() for tick in axes.get_yticklabels()]
    return found


def covers_data(axes):
    """Return whether a legend lies in these axes."""
    figure = axes.figure
    figure.canvas.draw()
    legends = [each for each in (axes.get_legend(), *figure.legends) if each]
    return any(each.get_window_extent().overlaps(axes.get_window_extent()) for each in legends)


def hexes(colors):
    from matplotlib.colors import to_hex

    return [to_hex(color).upper() for color in colors]


# --- comparisons

CURVES = {
    "wagma": [[(1.0, 0.5), (2.0, 0.9)], [(3.0, 0.7), (4.0, 0.8)]],
    "wagma:group_size=2": [[(1.0, 0.5), (2.0, 0.9)]],
    "allreduce": [[], []],
}
RATES = {"wagma": [10.0, 30.0], "wagma:group_size=2": [5.0], "allreduce": [1.0, 2.0]}


def test_a_comparison_is_drawn_over_time_with_the_means_and_spreads_of_the_seeds(figures, tmp_path):
    plots.draw_comparison(tmp_path, CURVES, RATES, "accuracy", 0.95, "mine: 4 ranks")
    figure = figures["comparison.png"]
    over_time, throughput = figure.axes
    assert legend(figure) == ["wagma", "wagma:group_size=2", "target: 95 %"]
    first, _, target = over_time.lines
    assert np.allclose(first.get_xydata(), [(2.0, 60), (3.0, 85)])
    assert np.allclose(target.get_ydata(), 95)
    assert len(over_time.collections) == 1
    assert [bar.get_width() for bar in throughput.patches] == [20.0, 5.0, 1.5]
    assert throughput.get_ylim() == (2.5, -0.5)  # a row for each method, and no other
    assert figure.get_suptitle() == "mine: 4 ranks"
    labels = (over_time.get_xlabel(), over_time.get_ylabel(), throughput.get_xlabel())
    assert labels == ("time in s", "accuracy in %", "samples per second")
    assert all("of the seeds" in axes.get_title() for axes in figure.axes)
    assert not covers_data(over_time) and not covers_data(throughput)


def test_seeds_with_different_numbers_of_evaluations_are_drawn_as_far_as_all_have_them(
    figures, tmp_path
):
    longer = [(1.0, 0.5), (2.0, 0.7), (3.02, 0.9)]
    curves = {"wagma": [[(1.0, 0.7), (1.98, 0.8)], longer, []], "allreduce": [longer]}
    rates = {"wagma": [10.0, 20.0, 30.0], "allreduce": [5.0]}
    plots.draw_comparison(tmp_path, curves, rates, "accuracy", None, "")
    first, second = figures["comparison.png"].axes[0].lines
    assert np.allclose(first.get_xydata(), [(1.0, 60), (1.99, 75)])
    assert np.allclose(second.get_xydata(), [(1.0, 50), (2.0, 70), (3.02, 90)])


def test_a_method_has_one_color_in_both_halves_of_a_comparison(figures, tmp_path):
    plots.draw_comparison(tmp_path, CURVES, RATES, "accuracy", None, "")
    over_time, throughput = figures["comparison.png"].axes
    first, second = over_time.lines
    bars = hexes(bar.get_facecolor() for bar in throughput.patches)
    assert bars == [METHODS[name].color for name in ("wagma", "wagma", "allreduce")]
    assert hexes([first.get_color(), second.get_color()]) == bars[:2]
    assert first.get_linestyle() != second.get_linestyle()


def test_with_one_seed_nothing_is_said_of_seeds(figures, tmp_path):
    curves = {"wagma": [[(1.0, 0.5), (2.0, 0.25)]], "sgp": [[(1.0, 0.5), (2.0, 0.5)]]}
    plots.draw_comparison(tmp_path, curves, {"wagma": [10.0], "sgp": [5.0]}, "loss", 0.3, "mine")
    figure = figures["comparison.png"]
    over_time, throughput = figure.axes
    assert not any("seed" in text or "lowest" in text for text in words(figure))
    assert not over_time.collections and not throughput.collections
    assert over_time.get_ylabel() == "loss"
    assert np.allclose(over_time.lines[0].get_ydata(), [0.5, 0.25])
    assert np.allclose(over_time.lines[-1].get_ydata(), 0.3)


def test_without_a_metric_a_comparison_is_of_throughput_alone(figures, tmp_path):
    plots.draw_comparison(tmp_path, {"wagma": [[]]}, {"wagma": [10.0]}, "", 0.9, "mine")
    (throughput,) = figures["comparison.png"].axes
    assert throughput.get_title() == "throughput"


# --- simulations


def simulated(ranks):
    times = steps.log_normal(10, ranks, 0.5, 0.2, seed=0)
    chosen = {name: {} for name in ("allreduce", "wagma", "eager-sgd")}
    chosen[MAJORITY] = {"trigger": "majority"}
    return {
        name: simulate(named(name), times, MACHINES["hdr"], Settings(1 << 20, **options))
        for name, options in chosen.items()
    }


@pytest.fixture
def simulation(figures, tmp_path):
    """Return simulations of 2 and 8 ranks, and the figure that is drawn of them."""
    found = [simulated(ranks) for ranks in (2, 8)]
    results = {name: [each[name] for each in found] for name in found[0]}
    plots.draw_simulation(tmp_path, results, "mine: 10 steps\nhdr: latency 0.9 µs")
    return results, figures["simulation.png"]


def test_a_simulation_is_drawn_over_ranks_as_ratios_to_the_ideal(simulation):
    results, figure = simulation
    throughput, idle, *_ = figure.axes
    ideal, *lines = throughput.lines
    assert np.allclose(ideal.get_ydata(), 100)
    assert {line.get_label() for line in lines} == set(results)
    for line, share in zip(lines, idle.lines):
        of = results[line.get_label()]
        bounds = [each.made.sum() / each.compute.max() for each in of]
        ratios = [each.throughput / bound for each, bound in zip(of, bounds)]
        assert line.get_xdata().tolist() == share.get_xdata().tolist() == [2, 8]
        assert line.get_ydata() == pytest.approx([100 * ratio for ratio in ratios])
        assert max(ratios) <= 1
        assert share.get_ydata() == pytest.approx([100 * each.idle_share for each in of])


def test_a_simulation_of_one_number_of_ranks_is_drawn_as_bars_the_fastest_first(figures, tmp_path):
    times = steps.constant(10, 8, 0.5) * np.where(np.arange(8) == 0, 4, 1)
    names = ("allreduce", "d-psgd", "local-sgd", "wagma:group_size=2")
    of = {name: [simulate(named(name), times, MACHINES["10gbe"], Settings(1 << 27))]
          for name in names}  # fmt: skip
    plots.draw_simulation(tmp_path, of, "")
    figure = figures["simulation.png"]
    throughput, idle, stale = figure.axes
    ratios = {name: 100 * each.ideal_wall / each.wall for name, (each,) in of.items()}
    order = sorted(names, key=lambda name: -ratios[name])
    assert [text.get_text() for text in throughput.get_yticklabels()] == order
    assert [bar.get_width() for bar in throughput.patches] == [ratios[name] for name in order]
    shares = [100 * of[name][0].idle_share for name in order]
    assert [bar.get_width() for bar in idle.patches] == shares
    for axes, values in ((throughput, [ratios[name] for name in order]), (idle, shares)):
        low, high = axes.get_xlim()
        assert low == 0 and max(values) < 0.95 * high  # there is room for the numbers
        assert [text.get_text() for text in axes.texts] == [f"{value:.1f}" for value in values]
        colors = hexes(bar.get_facecolor() for bar in axes.patches)
        assert colors == [plots.color_of(name) for name in order]
    (ideal,) = throughput.lines
    assert set(ideal.get_xdata()) == {100} and legend(figure) == ["ideal: no rank waits"]
    assert throughput.get_xlabel() == "throughput ÷ ideal throughput in %"
    assert throughput.get_title() == "throughput, 8 ranks"
    assert stale.get_title() == "wagma:group_size=2, 8 ranks"
    figure.canvas.draw()
    boxes = [axes.get_window_extent() for axes in figure.axes]
    assert not any(figure.legends[0].get_window_extent().overlaps(box) for box in boxes)


def test_staleness_is_drawn_on_equal_axes_one_for_each_method_that_has_some(simulation):
    results, figure = simulation
    stale = figure.axes[2:]
    names = ["wagma", "eager-sgd", MAJORITY]
    assert [axes.get_title() for axes in stale] == [f"{name}, 8 ranks" for name in names]
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in stale}) == 1
    for name, axes in zip(names, stale):
        counts = results[name][-1].staleness
        heights = [bar.get_height() for bar in axes.patches]
        assert heights == pytest.approx(list(100 * counts / counts.sum()))
        assert axes.get_xlim()[1] > len(counts) - 1
        assert axes.get_xlabel() == "staleness in versions" and "%" in axes.get_ylabel()


def test_a_method_has_one_color_in_all_of_a_simulation_and_no_legend_covers_data(simulation):
    results, figure = simulation
    throughput, idle, *stale = figure.axes
    colors = {line.get_label(): line.get_color() for line in throughput.lines[1:]}
    assert colors == {name: plots.color_of(name) for name in results}
    assert [line.get_color() for line in idle.lines] == list(colors.values())
    for axes in stale:
        name = axes.get_title().partition(",")[0]
        assert set(hexes(bar.get_facecolor() for bar in axes.patches)) == {colors[name]}
    solo, majority = (
        next(line for line in throughput.lines if line.get_label() == name)
        for name in ("eager-sgd", MAJORITY)
    )
    assert solo.get_linestyle() != majority.get_linestyle()
    assert set(legend(idle)[1:]) == set(results)
    figure.canvas.draw()
    boxes = [axes.get_window_extent() for axes in figure.axes]
    assert not any(idle.get_legend().get_window_extent().overlaps(box) for box in boxes)


def test_a_simulation_says_what_it_is_of_and_every_axis_its_unit(simulation):
    figure = simulation[1]
    assert figure.get_suptitle() == "mine: 10 steps\nhdr: latency 0.9 µs"
    throughput, idle, *_ = figure.axes
    assert throughput.get_xlabel() == idle.get_xlabel() == "ranks"
    assert throughput.get_ylabel() == "throughput ÷ ideal throughput in %"
    assert idle.get_ylabel() == "share of the ranks' time in %"
    assert throughput.get_title() and idle.get_title()


def test_numbers_of_ranks_that_are_close_have_one_label():
    assert plots.spaced([4]) == [4]
    assert plots.spaced([4, 16, 64, 256, 1024]) == [4, 16, 64, 256, 1024]
    many = list(range(1, 1025))
    kept = plots.spaced(many)
    assert len(kept) <= plots.MOST_TICKS + 1 and kept[0] == 1 and set(kept) <= set(many)


def test_a_simulation_that_was_ended_early_is_drawn_as_far_as_it_came(figures, tmp_path):
    plots.draw_simulation(tmp_path, {"allreduce": [], "wagma": []}, "")
    assert not figures
    wagma = simulated(1)["wagma"]
    plots.draw_simulation(tmp_path, {"allreduce": [], "wagma": [wagma]}, "")
    assert figures["simulation.png"].axes[2].get_title() == "wagma, 1 rank"
    allreduce = simulated(2)["allreduce"]
    plots.draw_simulation(tmp_path, {"allreduce": [allreduce], "wagma": []}, "")
    assert len(figures["simulation.png"].axes) == 2
