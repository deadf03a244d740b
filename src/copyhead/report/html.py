"""One self-contained page: tables, figures, settings, and what was not reproduced."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined


class Shown(NamedTuple):
    """A figure of the page. path: its PNG."""

    name: str
    caption: str
    path: Path


def number(value: Any) -> str:
    """Six significant digits; nothing for None and nan; other values as they are."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool | str | int):
        return str(value)
    return f"{float(value):.5g}"


def render(figures: list[Shown], page: str = "report.html.j2", **content: Any) -> str:
    """A page as text; figures are embedded, nothing is loaded from elsewhere."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["number"] = number
    embedded = [{"name": f.name, "caption": f.caption, "data": base64.b64encode(f.path.read_bytes()).decode()} for f in figures]
    return environment.get_template(page).render(figures=embedded, **content)
