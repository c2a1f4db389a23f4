"""What a running server says of itself, read from its Prometheus endpoint and made readable."""

from adaspec.monitor.figures import Figures, VersionFigures, figures
from adaspec.monitor.follow import Monitor, Report, look
from adaspec.monitor.picture import draw, read_log
from adaspec.monitor.scrape import Scrape, fetch, parse
from adaspec.monitor.view import render

__all__ = [
    "Figures",
    "Monitor",
    "Report",
    "Scrape",
    "VersionFigures",
    "draw",
    "fetch",
    "figures",
    "look",
    "parse",
    "read_log",
    "render",
]
