"""Reports that people look at: an HTML page of a run, a comparison or a simulation.

A page is one file that loads nothing else, with interactive plots by Vega-Lite, whose script
``vl-convert-python`` ships. ``pip install 'wagma[html]'`` installs what is needed.
"""

from wagma.html.page import check, is_run, write

__all__ = ["check", "is_run", "write"]
