"""One self-contained HTML page: text, tables and drawings, nothing fetched when it is opened."""

from __future__ import annotations

import io
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thinwire_lab import files
from thinwire_lab.report import style
from thinwire_lab.runs.versions import versions

WIDE = 7.0  # inches, from which on a drawing has a row to itself

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>
  :root { color-scheme: light dark; --ink: #1f2430; --paper: #ffffff; --quiet: #5c6473;
          --line: #d8dbe2; --stress: #eef4fb; }
  @media screen and (prefers-color-scheme: dark) {
    :root { --ink: #e6e8ee; --paper: #14171d; --quiet: #9aa3b2; --line: #343a46; --stress: #1d2734;
      {{ dark }} }
  }
  @media print {
    body { max-width: none; margin: 0; font-size: 10pt; }
    figure, tr { break-inside: avoid; }
    h2 { break-after: avoid; }
    .scroll { overflow: visible; }
    th, td { white-space: normal; }
  }
  body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
         max-width: 66rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
  h1 { font-size: 1.6rem; line-height: 1.25; margin-bottom: .2rem; }
  h2 { font-size: 1.15rem; line-height: 1.3; margin: 2.2rem 0 .6rem; padding-bottom: .2rem;
       border-bottom: 1px solid var(--line); }
  p, li { max-width: 46rem; }
  p.lead { font-size: 1.1rem; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
  th, td { padding: .3rem .9rem .3rem 0; text-align: right; white-space: nowrap;
           vertical-align: top; border-bottom: 1px solid var(--line); }
  th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 11rem; }
  th { color: var(--quiet); font-weight: 600; }
  tr.best td { font-weight: 600; background: var(--stress); }
  .scroll { overflow-x: auto; }
  .drawings { display: grid; gap: 1.2rem 1.6rem; align-items: start;
              grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); }
  figure { margin: 0; min-width: 0; }
  figure:has(svg.wide) { grid-column: 1 / -1; }
  svg { display: block; width: 100%; height: auto; fill: var(--ink); }
  footer { color: var(--quiet); margin: 2.5rem 0 1rem; padding-top: .6rem; font-size: .85rem;
           border-top: 1px solid var(--line); }
  code { font-family: ui-monospace, monospace; font-size: .95em; }
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
{%- if section.drawings %}<div class="drawings">
{% for drawing in section.drawings %}<figure>{{ drawing | safe }}</figure>
{% endfor %}</div>
{% endif %}
{%- endfor %}
<footer>Made {{ origin.date }} by <code>{{ origin.command }}</code>.<br>
{{ origin.versions }}; {{ origin.machine }}.<br>
Nothing on this page was fetched from anywhere.</footer>
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


def find_origin() -> dict[str, str]:
    """This moment, command, code and machine, without names of hosts and folders."""
    code = versions() | {"Python": platform.python_version()}
    program = Path(sys.argv[0]).name.replace("__main__.py", "thinwire")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join([program, *map(_drop_folder, sys.argv[1:])]),
        "versions": ", ".join(f"{name} {text}" for name, text in code.items()),
        "machine": f"{os.cpu_count()} cores, {memory:.0f} GB of memory, {platform.machine()}",
    }


def _drop_folder(argument: str) -> str:
    """An absolute path by its last part, also behind a flag and its `=`."""
    flag, equals, value = argument.rpartition("=") if argument[:1] == "-" else ("", "", argument)
    return f"{flag}{equals}{Path(value).name if Path(value).is_absolute() else value}"


def html(page: Page) -> str:
    """The page as one text."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=False)
    dark = " ".join(f"--x{light[1:]}: {dark};" for light, dark in style.DARK.items())
    return environment.from_string(_TEMPLATE).render(page=page, origin=find_origin(), dark=dark)


def write(page: Page, path: Path) -> None:
    files.write(path, html(page))


def possible() -> None:
    """Asked before hours of work, of which a page is to tell."""
    for name in ("jinja2", "matplotlib"):
        if find_spec(name) is None:
            raise ValueError(f"a page needs {name}: pip install 'thinwire[plots]'")


def drawing(figure: Any) -> str:
    """A matplotlib figure as SVG to put into a page, where dark paper changes its colours."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "thinwire", "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    for light in style.DARK:
        text = text.replace(f": {light}", f": var(--x{light[1:]}, {light})")
    return text if figure.get_figwidth() < WIDE else text.replace("<svg", '<svg class="wide"', 1)
