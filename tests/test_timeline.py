"""The picture of runs' steps: when each part of a step began."""

import runpy

import pages

intervals = runpy.run_path(str(pages.ROOT / "tools" / "timeline.py"))["intervals"]


def test_the_parts_of_a_step_end_when_it_does():
    first = {"compute_s": 0.25, "delay_s": 0.5, "average_s": 0.125, "elapsed_s": 1.0}
    second = {"compute_s": 0.25, "delay_s": 0.0, "average_s": 0.5, "elapsed_s": 2.0}
    assert intervals([first, second]) == {
        "compute_s": [(0.125, 0.25), (1.25, 0.25)],
        "delay_s": [(0.375, 0.5), (1.5, 0.0)],
        "average_s": [(0.875, 0.125), (1.5, 0.5)],
    }
