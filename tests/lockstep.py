"""A pytest plugin that keeps the ranks of an MPI job together, test by test.

After each phase of each test every rank sends the others its outcome. A failure on one rank fails
the test on all, so the ranks continue in step, and rank 0, the only one that prints, reports it
with its traceback. If ranks cannot meet (one waits for a message that will not come), each rank
that still runs prints where it is, and the job is aborted.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

SIZES = (4, 3, 8, 1)  # the numbers of ranks that the suite runs with
DEFAULT_SIZES = (4,)
# Seconds that a rank whose test failed waits for the others.
GRACE = float(os.environ.get("LOCKSTEP_GRACE", "5"))
PATIENCE = 120.0  # seconds that other ranks wait, unless the test has a time limit of its own
PRINTING = float(
    os.environ.get("LOCKSTEP_PRINTING", "1")
)  # seconds between a rank's last message and the abort, for those of the others


def check_ranks(item) -> tuple[int, ...]:
    """Return the numbers of ranks that a test declares, none for a test without MPI."""
    marker = item.get_closest_marker("ranks")
    if item.get_closest_marker("mpi") is None:
        if marker:
            raise pytest.UsageError(f"{item.nodeid}: `ranks` without `mpi`")
        return ()
    sizes = marker.args if marker else DEFAULT_SIZES
    if unknown := set(sizes) - set(SIZES):
        raise pytest.UsageError(f"{item.nodeid}: the suite never has {sorted(unknown)} ranks")
    return sizes


def may_run_with(size, text) -> bool:
    """Return whether tests of a module with this text may run with this number of ranks."""
    declared = re.findall(r"\branks\(([^)]*)\)", text)
    elsewhere = {str(other) for other in SIZES if other != size}
    return size in DEFAULT_SIZES or not all(
        set(sizes.split(", ")) <= elsewhere for sizes in declared
    )


def transports(item, names) -> tuple[str, ...]:
    """Return which of an MPI test's transports it runs with in this job.

    A test for several numbers of ranks runs with every transport only with four ranks. One rank has
    nobody to share its memory with.
    """
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    if size != DEFAULT_SIZES[0] and DEFAULT_SIZES[0] in check_ranks(item):
        names = names[:1] if size < DEFAULT_SIZES[0] else names[-1:]
    return names[:1] if size == 1 else names


class Lockstep:
    """The plugin's hooks, on one rank."""

    def __init__(self, config):
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        self._comm = MPI.COMM_WORLD.Dup()
        self._rank = self._comm.rank
        self._config = config
        self._capture = config.pluginmanager.get_plugin("capturemanager")
        self._collection_errors = []
        self._patience = PATIENCE
        self._watchdog = None
        self._missing = []
        with self._capture.global_and_fixture_disabled():
            self._stderr = os.dup(2)

    # Before the tests

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self):
        if self._rank:
            self._config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115

    def pytest_ignore_collect(self, collection_path):
        """Skip modules without a test for this number of ranks: importing them takes long.

        A module that declares numbers of ranks in another way than one by one, or wrong ones, is
        imported.
        """
        size = self._comm.size
        if size not in SIZES or collection_path.suffix != ".py":
            return None
        return not may_run_with(size, collection_path.read_text()) or None

    def pytest_collection_modifyitems(self, config, items):
        here, elsewhere = [], []
        for item in items:
            (here if self._comm.size in check_ranks(item) else elsewhere).append(item)
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = here

    def pytest_collectreport(self, report):
        if report.failed:
            self._collection_errors.append(report.longreprtext)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session):
        mine = [item.nodeid for item in session.items], self._collection_errors
        everyones = self._meet("collection", mine, GRACE if self._collection_errors else PATIENCE)
        if any(theirs != mine for theirs in everyones.values()):
            errors = {rank: "\n".join(errors) for rank, (_, errors) in everyones.items() if errors}
            reason = "the ranks have collected different tests"
            pytest.exit("\n".join([reason, *by_text(errors).values()]), returncode=1)

    # A test

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item, settings):
        self._patience = settings.timeout + 2 * PRINTING
        self._watchdog = threading.Timer(settings.timeout, self._time_out, [item, settings.timeout])
        self._watchdog.daemon = True
        self._watchdog.start()
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_cancel_timer(self):
        # pytest-timeout also cancels at a failure; but a failed test's teardown can hang as well.
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        try:
            return (yield)
        finally:
            if self._watchdog:
                self._watchdog.cancel()
            self._patience, self._watchdog = PATIENCE, None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        text = report.longreprtext if report.failed else ""
        if report.failed:
            text += "".join(f"\n--- {title}\n{content}" for title, content in report.sections)
        everyones = self._meet(
            f"{call.when} of {item.nodeid}",
            (report.outcome, text),
            GRACE if report.failed else self._patience,
            last_words=text,
        )
        merge(report, self._rank, everyones)
        return report

    def pytest_runtest_logreport(self, report):
        # Now, not at the end: the next test may abort.
        if report.failed:
            terminal = self._config.get_terminal_writer()
            terminal.line()
            terminal.sep("_", f"{report.when} of {report.nodeid}", red=True, bold=True)
            report.toterminal(terminal)
            for title, content in report.sections:
                terminal.sep("-", title)
                terminal.line(content.rstrip())

    # After the tests

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        self._meet("the end", None, self._patience)
        if session.testscollected:
            self._config.option.tbstyle = "no"  # the failures have been printed

    def pytest_internalerror(self, excrepr):
        self._abort("pytest failed", str(excrepr))

    # Meeting

    def _meet(self, where, message, patience, last_words=""):
        """Return every rank's message, by rank; abort if the ranks do not come together."""
        everyones = {self._rank: message}
        missing = self._missing = [r for r in range(self._comm.size) if r != self._rank]
        sends = [self._comm.isend((where, message), rank) for rank in missing]
        deadline = time.monotonic() + patience
        while missing or sends:
            for rank in list(missing):
                arrived = self._comm.improbe(source=rank)
                if arrived:
                    there, everyones[rank] = arrived.recv()
                    missing.remove(rank)
                    if there != where:
                        self._abort(f"is at {where}, rank {rank} at {there}", last_words)
            sends = [send for send in sends if not send.test()[0]]
            if time.monotonic() > deadline:
                self._abort(f"is at {where}; {name(missing)} did not come", last_words)
            time.sleep(0.0005)
        return dict(sorted(everyones.items()))

    def _time_out(self, item, limit):
        reason = f"{item.nodeid} has not ended after {limit} s"
        if self._missing:
            self._abort(reason, f"This rank waits for {name(self._missing)}.")
        self._abort(reason, self._output() + stacks())

    def _abort(self, reason, last_words=""):
        """Print why, and end the job."""
        text = f"\n=== rank {self._rank}: {reason}\n{last_words or stacks()}\n"
        os.write(self._stderr, text.encode())
        # An abort that hangs must not keep the job.
        threading.Timer(5, os._exit, [1]).start()
        time.sleep(PRINTING)
        self._world.Abort(1)

    def _output(self):
        output = zip(("stdout", "stderr"), self._capture.read_global_capture())
        return "".join(f"--- captured {name}\n{text}" for name, text in output if text)


def stacks() -> str:
    """Return the stacks of all threads, below pytest's own frames, but not a calling watchdog's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    asking = threading.current_thread()
    lines = []
    for ident, frame in sys._current_frames().items():
        if ident != asking.ident or asking is threading.main_thread():
            frames = traceback.extract_stack(frame)
            own = [i for i, f in enumerate(frames) if "_pytest" in Path(f.filename).parts]
            lines.append(f"--- stack of {names.get(ident, ident)}\n")
            lines += traceback.format_list(frames[max(own, default=-1) + 1 :])
    return "".join(lines)


class OthersFailure:
    """What a report shows of another rank's failure.

    It is no string, because pytest's summary would repeat that, under CI all of it.
    """

    def __init__(self, text):
        self._text = text

    def __str__(self):
        return self._text

    def toterminal(self, terminal):
        terminal.line(self._text)


def merge(report, rank, everyones):
    """Add to one rank's report what happened on all ranks."""
    ranks_of = {}
    for other, (outcome, _) in everyones.items():
        ranks_of.setdefault(outcome, []).append(other)
    failures = {other: text for other, (outcome, text) in everyones.items() if outcome == "failed"}
    if not failures and len(ranks_of) > 1:
        failures[rank] = "; ".join(f"{outcome} on {name(on)}" for outcome, on in ranks_of.items())
    if report.failed:
        del failures[rank]
        report.sections += by_text(failures).items()
    elif failures:
        report.outcome = "failed"
        text = "\n".join(f"{who}:\n{text}" for who, text in by_text(failures).items())
        report.longrepr = OthersFailure(text)
        vars(report).pop("wasxfail", None)


def by_text(texts):
    """Turn {rank: text} into {"ranks …": text}, each text once."""
    ranks_of = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    return {name(ranks): text for text, ranks in ranks_of.items()}


def name(ranks):
    """Return "rank 2" or "ranks 0, 1"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
