"""Writes docs/repository.md: every folder and file, with the first sentence of its docstring."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "repository.md"
WIDTH = 118  # columns
HEAD = """\
# Repository

Every folder and file, with the first sentence of its docstring. `python docs/repository.py` writes
this page, and a test fails when it is out of date.

| folder | what |
|---|---|
| `thinwire` | the library |
| `thinwire_lab` | the laboratory: trainings, benchmarks, proofs, reports and the command line |
| `examples` | complete scripts to copy |
| `tests` | tests, in folders like those of the library; `contracts` runs every recipe |
| `docs` | this site, its figures, and recorded results |

Start with `thinwire/recipes`, then the two leaves (`Select` and `Project`), then the protocols.
"""


def write_page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_package("thinwire"), *_package("thinwire_lab")]).rstrip() + "\n"


def _package(name: str) -> Iterator[str]:
    """A section per folder, files in alphabetical order."""
    folders = {path.parent for path in (ROOT / name).rglob("*.py")}
    for folder in sorted(folders):
        yield f"## `{folder.relative_to(ROOT)}`\n"
        package = folder / "__init__.py"
        if package.exists():
            yield _wrapped(_sentence(package)) + "\n"
        for path in sorted(folder.glob("*.py")):
            if path != package:
                yield _wrapped(f"* `{path.name}`: {_sentence(path)}")
        yield ""


def _wrapped(text: str) -> str:
    indent = "  " if text[0] == "*" else ""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _sentence(path: Path) -> str:
    """The first sentence of the docstring, on one line."""
    told = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = " ".join(told.split("\n\n")[0].split()).removesuffix("::")
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", line)[0].rstrip(":")


if __name__ == "__main__":
    PAGE.write_text(write_page())
