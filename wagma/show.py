"""Tables on standard output: with rich on a terminal, else as plain lines."""

from __future__ import annotations

from wagma import progress


def table(columns: dict[str, list[str]]) -> None:
    """Print a table: the first column at the left, the others at the right.

    Args:
        columns: by heading, the strings of each column.
    """
    output = progress.terminal()
    names = list(columns)
    lines = list(zip(*columns.values()))
    if output is not None:
        from rich.console import Console
        from rich.table import Table

        made = Table(names[0], header_style="bold")
        made.columns[0].style = "cyan"
        for heading in names[1:]:
            made.add_column(heading, justify="right")
        for line in lines:
            made.add_row(*line)
        Console(file=output, markup=False).print(made)
        return
    lines.insert(0, tuple(names))
    widths = [max(map(len, column)) for column in zip(*lines)]
    for name, *cells in lines:
        padded = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:])]
        print(f"{name:<{widths[0]}}  " + "  ".join(padded))
