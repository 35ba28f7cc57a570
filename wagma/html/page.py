"""A page: its parts, and its file."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import wagma
from collectives.process import describe
from wagma.html.charts import CONFIG, Chart
from wagma.job import UsageError

if TYPE_CHECKING:
    from wagma.report import Report

NAME = "report.html"
NEEDED = {"jinja2": "jinja2", "vl_convert": "vl-convert-python"}  # packages by module


class Table(NamedTuple):
    """A table of a page.

    Args:
        title: What it shows.
        heading: The columns'; () for names and values.
        rows: Texts; the first of a row names it.
    """

    title: str
    heading: Sequence[str]
    rows: Sequence[Sequence[str]]


class Section(NamedTuple):
    """A section of a page; one without plots and tables is left out.

    Args:
        title: Its heading.
        charts, tables: What it has.
        lines: Sentences in front of them.
        folded: Whether it is shown only when it is opened.
    """

    title: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    lines: Sequence[str] = ()
    folded: bool = False


@dataclass
class Page:
    """A page.

    Attributes:
        title: Its heading.
        subtitle: What it is about.
        figures: Pairs of the most important numbers, as texts, and what they are.
        sections: Its sections.
    """

    title: str
    subtitle: str
    figures: list[tuple[str, str]] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)


def check(directory: Path) -> None:
    """Raise UsageError if a directory has nothing to make a page of, or a package is missing."""
    missing = [NEEDED[each] for each in NEEDED if importlib.util.find_spec(each) is None]
    if missing:
        raise UsageError(
            f"argument --html: {', '.join(missing)} not installed: pip install 'wagma[html]'"
        )
    if not (is_run(directory) or any((directory / name).exists() for name in kinds())):
        raise UsageError(
            f"argument --html: {directory} has no rank-*.jsonl and no {' or '.join(kinds())}: is "
            "it a directory of wagma train, compare or simulate?"
        )


def is_run(directory: Path) -> bool:
    """Return whether a directory is a run's."""
    return any(directory.glob("rank-*.jsonl"))


def kinds() -> dict[str, Callable[[Path], Page]]:
    """Return what makes the page of a directory that has a file of this name."""
    from wagma.html import comparison, simulation

    return {comparison.FILE: comparison.page, simulation.FILE: simulation.page}


def read(path: Path, *parts: str) -> dict[str, Any]:
    """Return what a comparison or a simulation has written when it was over.

    Args:
        path: The file.
        parts: What must be in it.

    Raises:
        UsageError: It is damaged.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        missing = [part for part in parts if not record[part]]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged: {describe(error)}") from error
    if missing:
        raise UsageError(f"{path} has no {' and no '.join(missing)}")
    return record


def write(directory: Path, found: Report | None = None) -> Path:
    """Write ``report.html`` of a run, a comparison or a simulation, and return its path.

    Args:
        directory: That of `wagma train`, `wagma compare` or `wagma simulate`; see `check`.
        found: What `wagma.report.of` has found in the run; None: the page says nothing of it.

    Raises:
        UsageError: A file is damaged, or cannot be read or written.
    """
    try:
        return _write(directory, found)
    except OSError as error:
        path, reason = error.filename or directory, error.strerror or error
        raise UsageError(f"no page of {directory}: {path}: {reason}") from error
    except ValueError as error:
        raise UsageError(f"no page of {directory}: {error}") from error


def _write(directory: Path, found: Report | None) -> Path:
    from wagma.html import run

    if is_run(directory):
        made = run.page(directory, found)
    else:
        made = next(make for name, make in kinds().items() if (directory / name).exists())(
            directory
        )
    part = directory / f"{NAME}.part"
    part.write_text(render(made), encoding="utf-8")
    os.replace(part, directory / NAME)
    return directory / NAME


def render(page: Page) -> str:
    """Return a page as HTML."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = [each for each in page.sections if each.charts or each.tables or each.lines]
    return environment.get_template("page.html").render(
        page=page,
        sections=shown,
        specs=[chart.spec for section in shown for chart in section.charts],
        config=CONFIG,
        version=wagma.__version__,
        script=script(),
    )


@functools.cache
def script() -> str:
    """Return Vega-Lite's, in which nothing seems to end an HTML script."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace(
        "</script", "<\\/script"
    )


def table_of(title: str, columns: dict[str, list[str]]) -> Table:
    """Return a table of columns by heading, of which the first names the rows."""
    return Table(title, tuple(columns), list(zip(*columns.values())))


def settings_table(title: str, settings: dict[str, Any]) -> Table:
    """Return a table of settings by name, those inside others with their names before."""
    return Table(title, (), [(name, value) for name, value in flat(settings) if value != "None"])


def flat(settings: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Return settings by name, as texts."""
    rows: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            rows += flat(value, f"{before}{name}.")
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            for number, each in enumerate(value):
                rows += flat(each, f"{before}{name}.{number}.")
        elif isinstance(value, list):
            same = len(set(map(str, value))) == 1 and len(value) > 1
            text = f"{value[0]} (all {len(value)})" if same else ", ".join(map(str, value))
            rows.append((before + name, text))
        else:
            rows.append((before + name, str(value)))
    return rows
