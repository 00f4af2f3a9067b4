"""One self-contained HTML page: text, tables and drawings, nothing fetched when it is opened."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thinwire.jobs import logs

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; color: #1f2430; background: #fff;
         max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
  h1 { font-size: 1.5rem; margin-bottom: .2rem; }
  h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; border-bottom: 1px solid #d8dbe2; }
  p.lead { font-size: 1.1rem; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
  th, td { padding: .2rem .8rem .2rem 0; text-align: right; white-space: nowrap; }
  th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 14rem;
                                   overflow-wrap: anywhere; }
  th { color: #6b7280; font-weight: 600; border-bottom: 1px solid #d8dbe2; }
  tr.best td { font-weight: 600; }
  .scroll { overflow-x: auto; }
  figure { display: inline-block; margin: .3rem .6rem .3rem 0; max-width: 100%; }
  svg { max-width: 100%; height: auto; }
  li { margin: .1rem 0; }
  footer { color: #6b7280; margin: 2rem 0; font-size: .85rem; }
</style>
</head>
<body>
<h1>{{ page.title }}</h1>
<p class="lead">{{ page.lead }}</p>
{% for section in page.sections %}
<h2>{{ section.title }}</h2>
{% for line in section.text %}<p>{{ line }}</p>
{% endfor %}
{%- if section.table %}<div class="scroll"><table>
<tr>{% for cell in section.table[0] %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in section.table[1:] %}<tr{% if loop.index0 == section.best %} class="best"{% endif %}>
{%- for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endif %}
{%- if section.points %}<ul>
{% for point in section.points %}<li>{{ point }}</li>
{% endfor %}</ul>
{% endif %}
{%- for drawing in section.drawings %}<figure>{{ drawing | safe }}</figure>
{% endfor %}
{%- endfor %}
<footer>{{ page.foot }}</footer>
</body>
</html>
"""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and what is under it; `table` begins with its header, `best` is a row to stress."""

    title: str
    text: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()
    best: int = -1
    points: Sequence[str] = ()
    drawings: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    title: str
    lead: str
    sections: Sequence[Section] = field(default_factory=tuple)
    foot: str = "Made by thinwire; nothing on this page was fetched from anywhere."


def html(page: Page) -> str:
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=False)
    return environment.from_string(_TEMPLATE).render(page=page)


def write(page: Page, path: Path) -> None:
    logs.written(path, html(page))


def possible() -> None:
    """Asked before hours of work, of which a page is to tell."""
    for name in ("jinja2", "matplotlib"):
        if find_spec(name) is None:
            raise ValueError(f"a page needs {name}: pip install 'thinwire[plots]'")


def drawing(figure: Any) -> str:
    """A matplotlib figure as SVG to put into a page."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "thinwire", "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
