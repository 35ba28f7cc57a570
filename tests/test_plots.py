"""The plots: what is drawn of which numbers."""

import importlib.util
import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest

from wagma import plots
from wagma.runs import Tally
from wagma.simulation import MACHINES, Settings, simulate, steps

AVERAGING = {"waiting": 0.3, "communicating": 0.1, "bytes_sent": 0, "staleness": ()}


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
    assert legend(over_time) == ["rank 0", "rank 1", "mean"]
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
    assert legend(figures["loss.png"].axes[1])[0] == ("rank 0" if ranks == 1 else "each rank")


def test_without_matplotlib_one_line_says_so(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        plots.draw(tmp_path, tallies(1))
    assert caplog.messages == ["no loss.png and time.png: matplotlib is not installed"]
    assert not list(tmp_path.iterdir())


def test_a_comparison_is_drawn_over_time_with_the_means_and_spreads_of_the_seeds(figures, tmp_path):
    curves = {
        "one": [[(1.0, 0.5), (2.0, 0.9)], [(3.0, 0.7), (4.0, 0.8)]],
        "other": [[(1.0, 0.5), (2.0, 0.9)]],
        "untested": [[], []],
    }
    rates = {"one": [10.0, 30.0], "other": [5.0], "untested": [1.0, 2.0]}
    plots.draw_comparison(tmp_path, curves, rates, "accuracy")
    over_time, throughput = figures["comparison.png"].axes
    assert legend(over_time) == ["one", "other"]
    assert np.allclose(over_time.lines[0].get_xydata(), [(2.0, 0.6), (3.0, 0.85)])
    assert len(over_time.collections) == 1
    assert [bar.get_width() for bar in throughput.patches] == [20.0, 5.0, 1.5]


def simulated(ranks):
    times = steps.log_normal(10, ranks, 0.5, 0.2, seed=0)
    return {
        name: simulate(name, times, MACHINES["hdr"], Settings(1 << 20))
        for name in ("allreduce", "wagma")
    }


def test_a_simulation_is_drawn_over_ranks_and_its_staleness_for_the_most(figures, tmp_path):
    found = [simulated(ranks) for ranks in (2, 8)]
    plots.draw_simulation(tmp_path, {name: [each[name] for each in found] for name in found[0]})
    throughput, idle, staleness = figures["simulation.png"].axes
    for number, name in enumerate(("allreduce", "wagma")):
        drawn = throughput.lines[1 + number].get_xydata().tolist()
        assert drawn == [[each[name].ranks, each[name].throughput] for each in found]
        shares = idle.lines[number].get_ydata().tolist()
        assert shares == [100 * each[name].idle_share for each in found]
    assert legend(staleness) == ["wagma, 8 ranks"]
    assert sum(bar.get_height() for bar in staleness.patches) == pytest.approx(100)


def test_a_simulation_that_was_ended_early_is_drawn_as_far_as_it_came(figures, tmp_path):
    plots.draw_simulation(tmp_path, {"allreduce": [], "wagma": []})
    assert not figures
    plots.draw_simulation(tmp_path, {"allreduce": [simulated(1)["wagma"]], "wagma": []})
    assert list(figures) == ["simulation.png"]
