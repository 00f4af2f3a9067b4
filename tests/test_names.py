"""Every name that documents and errors use comes from one obvious place, and types accept it."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import thinwire
from thinwire import collectives, recipes

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *(ROOT / "examples").glob("*")]


@pytest.mark.parametrize("module", [thinwire, collectives])
def test_what_is_exported_is_there(module: object) -> None:
    for name in module.__all__:  # type: ignore[attr-defined]
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = module.Nothing  # type: ignore[attr-defined]


def test_all_that_a_recipe_may_be_written_with_is_in_thinwire() -> None:
    for name in (*recipes.SCHEDULES, *recipes.MEMORIES, *recipes.RULES):
        assert getattr(thinwire, name) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_imports_of_the_documents_work(page: Path) -> None:
    text = page.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S) if page.suffix == ".md" else [text]
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("thinwire"):
                home = import_module(str(node.module))
                assert all(hasattr(home, alias.name) for alias in node.names), node.module
