"""The plots of the pages, as Vega-Lite specifications, with their data.

Text and lines have the page's color, so that they suit a light and a dark page and paper. Each plot
is as wide as its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Spec = dict[str, Any]

DIGITS = 4  # that are significant in data
LEGEND_RANKS = 16  # more have no curves of their own
HEIGHT = 240  # pixels
ROW, LEAST_ROW = 18, 4  # pixels of a bar, if there is room, and otherwise
MOST_ROWS = 640  # pixels of all bars
FITTING: Spec = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
BINARY = {"type": "log", "base": 2}
ZOOM: Spec = {
    "name": "zoom",
    "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"},
    "bind": "scales",
}
CONFIG = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "titleFontWeight": "normal",
        "domainColor": "currentColor",
        "domainOpacity": 0.4,
        "tickColor": "currentColor",
        "tickOpacity": 0.4,
        "gridColor": "currentColor",
        "gridOpacity": 0.12,
        "labelOverlap": True,
    },
    "legend": {
        "labelColor": "currentColor",
        "titleColor": "currentColor",
        "titleFontWeight": "normal",
        "orient": "top",
        "direction": "horizontal",
        "columns": 4,
        "labelLimit": 260,
        "symbolStrokeWidth": 3,
    },
    "range": {"category": {"scheme": "tableau10"}},
}


class Chart(NamedTuple):
    """A plot of a page.

    Args:
        title: What it shows.
        spec: Its specification, without the page's `CONFIG`.
        note: How to read it.
        wide: Whether it takes the page's whole width.
    """

    title: str
    spec: Spec
    note: str = ""
    wide: bool = False


def table(columns: Mapping[str, Sequence[Any] | np.ndarray]) -> Spec:
    """Return data of equally long columns, numbers or texts; NaN becomes nothing."""
    lines = [",".join(columns)]
    lines += [",".join(map(cell, row)) for row in zip(*columns.values())]
    kinds = {
        name: "string" if len(column) and isinstance(column[0], str) else "number"
        for name, column in columns.items()
    }
    return {"values": "\n".join(lines), "format": {"type": "csv", "parse": kinds}}


def cell(value: Any) -> str:
    """Return a value of a table."""
    if isinstance(value, str):
        return '"' + value.replace('"', '""') + '"'
    return f"{value:.{DIGITS}g}" if abs(value) < 10**DIGITS or value % 1 else f"{value:.0f}"


def axis(field: str, title: str, **more: Any) -> Spec:
    """Return the encoding of a number by its place."""
    return {"field": field, "type": "quantitative", "title": title, **more}


def lines(
    columns: Mapping[str, Any],
    x: tuple[str, str],
    y: tuple[str, str],
    by: str | None = None,
    colors: Mapping[str, str] | None = None,
    band: tuple[str, str] | None = None,
    rule: float | None = None,
    points: bool = False,
    log_x: bool = False,
    from_0: bool = False,
) -> Spec:
    """Return curves, which the pointer can move and, with shift, its wheel can zoom.

    Args:
        columns: The data.
        x, y: Column and title of each axis; y is logarithmic if all its values are positive and
            they span more than a factor of 10.
        by: The column that a curve has one value of; None: there is one curve.
        colors: The color of each of its values.
        band: The columns between which the area is shaded.
        rule: A value of y to draw a line at.
        points: Whether to draw the points as well.
        log_x: Whether x is logarithmic, with base 2.
        from_0: Whether y begins at 0.
    """
    values = np.asarray(columns[y[0]], dtype=float)
    values = values[np.isfinite(values)]
    spans = bool(values.size and values.min() > 0 and values.max() > 10 * values.min())
    scale: Spec = {"zero": from_0}
    if spans and not from_0:
        scale = {"type": "log", "nice": False}
    place = {
        "x": axis(*x, scale=BINARY if log_x else {"zero": False, "nice": False}),
        "y": axis(*y, scale=scale, axis={"tickCount": 5}),
    }
    tips = [axis(*each, format=",.4~g") for each in (x, y)]
    params = [ZOOM]
    own: Spec = {"tooltip": tips}
    color: Spec = {}
    if by is not None:
        names = list(dict.fromkeys(columns[by]))
        color = {"color": {"field": by, "type": "nominal", "title": None, "sort": names}}
        if colors is not None:
            used = {"domain": names, "range": [colors[name] for name in names]}
            color["color"]["scale"] = used
        tips.insert(0, {"field": by, "type": "nominal"})
        select = {"type": "point", "fields": [by]}
        params = [ZOOM, {"name": "chosen", "select": select, "bind": "legend"}]
        own["opacity"] = {"condition": {"param": "chosen", "value": 1}, "value": 0.12}
    mark: Spec = {"type": "line", "clip": True, "point": points, "strokeWidth": 1.5}
    layers = [{"params": params, "mark": mark, "encoding": place | color | own}]
    if band is not None:
        shade = {"y": axis(band[0], y[1], scale=scale), "y2": {"field": band[1]}}
        mark = {"type": "area", "opacity": 0.18, "clip": True}
        layers.append({"mark": mark, "encoding": place | color | shade})
    if rule is not None:
        mark = {"type": "rule", "strokeDash": [2, 3], "color": "currentColor"}
        layers.append({"mark": mark, "encoding": {"y": {"datum": rule}}})
    return {**FITTING, "data": table(columns), "height": HEIGHT, "layer": layers}


def height_of(rows: int) -> int:
    """Return the height of so many rows, in pixels."""
    return max(LEAST_ROW * rows, min(ROW * rows, MOST_ROWS))


def bars(
    columns: Mapping[str, Any],
    x: tuple[str, str],
    y: tuple[str, str],
    by: str | None = None,
    colors: Mapping[str, str] | None = None,
    span: tuple[str, str] | None = None,
    most: float | None = None,
) -> Spec:
    """Return horizontal bars in the data's order.

    Args:
        columns: The data.
        x, y: Column and title of the length, and of the bar.
        by: The column by which a bar is divided into parts, in the order of the data.
        colors: The color of each part, or without parts of each bar.
        span: The columns of the ends of a line across a bar's end.
        most: The end of the axis; None: that of the data.
    """
    names = list(dict.fromkeys(columns[y[0]]))
    end = {} if most is None else {"domainMax": most}
    length: Spec = axis(*x, scale={"nice": False, **end})
    tips: list[Spec] = [
        {"field": y[0], "type": "nominal", "title": y[1]},
        {"field": x[0], "type": "quantitative", "title": x[1], "format": ",.4~g"},
    ]
    encoding: Spec = {
        "y": {
            "field": y[0],
            "type": "nominal",
            "sort": None,
            "title": y[1],
            "axis": {"labelLimit": 150},
        },
        "x": length,
    }
    own: Spec = {"tooltip": tips}
    part = by or y[0]
    if by is not None:
        tips.insert(1, {"field": by, "type": "nominal", "title": None})
        own["order"] = {"field": "order", "type": "quantitative"}
        columns = {**columns, "order": [list(colors or ()).index(name) for name in columns[by]]}
    if colors is not None:
        own["color"] = {
            "field": part,
            "type": "nominal",
            "title": None,
            "scale": {"domain": list(colors), "range": list(colors.values())},
            **({} if by else {"legend": None}),
        }
    layers = [{"mark": "bar", "encoding": own}]
    if span is not None:
        ends = {"x": {"field": span[0], "type": "quantitative"}, "x2": {"field": span[1]}}
        mark = {"type": "rule", "color": "currentColor", "strokeWidth": 1.5}
        layers.append({"mark": mark, "encoding": ends})
    return {
        **FITTING,
        "data": table(columns),
        "height": height_of(len(names)),
        "encoding": encoding,
        "layer": layers,
    }


def heat_map(columns: Mapping[str, Any], rows: int, limits: tuple[float, float]) -> Spec:
    """Return a heat map of milliseconds, rank by step.

    Args:
        columns: The data: rank, and last if a row has several; first and end of a cell's steps; ms.
        rows: Number of rows.
        limits: The values between which colors differ.
    """
    low, high = limits
    if not low < high:
        high = math.nextafter(low, math.inf) if low else 1.0
    several = "last" in columns
    tips = [
        {"field": name, "type": "quantitative", "title": title, "format": form}
        for name, title, form in (
            ("rank", "rank, first" if several else "rank", "d"),
            *([("last", "rank, last", "d")] if several else []),
            ("first", "step", "d"),
            ("end", "before step", "d"),
            ("ms", "ms", ",.4~g"),
        )
    ]
    return {
        **FITTING,
        "data": table(columns),
        "height": height_of(rows),
        "mark": {"type": "rect", "stroke": None},
        "encoding": {
            "x": axis("first", "step", scale={"zero": False, "nice": False}),
            "x2": {"field": "end"},
            "y": {"field": "rank", "type": "ordinal", "title": "rank"},
            "color": {
                "field": "ms",
                "type": "quantitative",
                "title": "ms",
                "scale": {"scheme": "viridis", "domain": [low, high], "clamp": True},
                "legend": {"gradientLength": 160, "gradientThickness": 10},
            },
            "tooltip": tips,
        },
    }
