"""Tables in documents: the long pages, the short tables, and the results they are made of."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.lab.runs.test_ledger import line
from thinwire_lab.cli.app import app
from thinwire_lab.local.workers import Refused
from thinwire_lab.report import documents
from thinwire_lab.runs import ledger

BOOKS = Path(__file__).parents[3] / "docs" / "results"
FILES = sorted(BOOKS.glob("*.jsonl"))
SPECIFICATION = """
pages = ["page.md"]
[digits]
where = { job = "mlp", net = "none" }
columns = [
  { head = "accuracy", show = "score" },
  { head = "points", show = "distance" },
  { head = "less", show = "saving" },
  { head = "there", show = "seconds", reach = 0.4 },
]
rows = [{ label = "all", recipe = 'dense()' }, { label = "few", recipe = 'topk()' }]
"""
PAGE = "before\n<!-- table digits -->\nold\n<!-- end -->\nafter\n"
SCORE = {"step": 1, "bytes_sent": 1e6, "elapsed": 7.0, "accuracy": 0.5}


@pytest.mark.parametrize("book", FILES, ids=lambda path: path.name)
def test_long_pages_say_what_the_files_say(book):
    page = BOOKS / "tables" / f"{book.stem}.md"
    assert page.read_text(encoding="utf-8") == documents.page_of(book), "make tables"


def test_every_long_page_has_its_file():
    pages = {page.stem for page in (BOOKS / "tables").iterdir()}
    assert pages == {file.stem for file in FILES}


def test_short_tables_say_what_the_files_say():
    pages = documents.filled_pages(BOOKS / "short.toml", ledger.read(FILES))
    for page, text in pages.items():
        assert page.read_text(encoding="utf-8") == text, "make tables"
    assert BOOKS.parent / "results.md" in {page.resolve() for page in pages}


def test_short_tables_are_short():
    """And the page has no table that is not made of results, but for three of words and seeds."""
    page = (BOOKS.parent / "results.md").read_text(encoding="utf-8")
    tables = [found[0] for found in documents.PLACE.finditer(page)]
    assert all(table.count("\n|") <= 10 for table in tables)
    assert documents.PLACE.sub("", page).count("\n| ---") == 3


def test_every_long_page_is_the_command_and_what_it_prints(monkeypatch):
    """Word for word, with the score that time is taken to."""
    monkeypatch.chdir(BOOKS)
    for file in FILES:
        page = (BOOKS / "tables" / f"{file.stem}.md").read_text(encoding="utf-8")
        page = page.replace("\n## ", "\n")  # titles are headings here
        (command,) = re.findall(r"^    thinwire (.*)$", page, re.M)
        assert command.split()[:3] == ["results", file.name, "--markdown"]
        printed = CliRunner().invoke(app, command.split()).output
        assert printed.strip() == page.partition(command)[2].strip()
    assert "--reach 0.5955" in (BOOKS / "tables" / "vgg16.md").read_text(encoding="utf-8")


@pytest.fixture
def book(tmp_path):
    """Two seeds of dense, one of top-k."""
    path = tmp_path / ledger.NAME
    for recipe, seed, accuracy in (("dense()", 0, 0.5), ("dense()", 1, 0.7), ("topk()", 0, 0.45)):
        made = replace(line(recipe, seed, accuracy), scores=[SCORE])
        ledger.append(path, made)
    (tmp_path / "short.toml").write_text(SPECIFICATION)
    (tmp_path / "page.md").write_text(PAGE)
    return path


def test_one_command_writes_pages_and_fills_short_tables(book, tmp_path):
    ask = ["results", str(book), "--tables", str(tmp_path / "long")]
    result = CliRunner().invoke(app, [*ask, "--short", str(tmp_path / "short.toml")])
    assert (result.exit_code, result.output) == (0, "")
    assert (tmp_path / "page.md").read_text().splitlines() == [
        "before", "<!-- table digits -->", "| recipe | accuracy | points | less | there |",
        "| --- | --- | --- | --- | --- |", "| all | 60.0 ± 14.1 % |  | 2.0 | 7 |",
        "| few | 45 % | -15.0 | 2.0 | 7 |", "<!-- end -->", "after",
    ]  # fmt: skip
    long = (tmp_path / "long" / "results.md").read_text()
    assert "| `dense()` | 60 % ± 14 (2) |" in long and "results.jsonl --markdown\n" in long


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("'topk()'", "'tpok()'", "no run for the row 'few'"),
     ('net = "none"', 'web = "none"', "KeyError('web')"),
     ("[digits]", "[letters]", "do not name the same tables: digits, letters"),
     ("page.md", "none.md", "No such file"), ("where", "[where", "TOMLDecodeError"),
     ('show = "saving"', 'show = "sving"', "KeyError('sving')")],
)  # fmt: skip
def test_a_wrong_specification_is_one_line_and_changes_nothing(book, tmp_path, old, new, message):
    path = tmp_path / "short.toml"
    path.write_text(SPECIFICATION.replace(old, new))
    with pytest.raises(Refused, match=re.escape(message)):
        documents.fill_pages(path, ledger.read([book]))
    assert (tmp_path / "page.md").read_text() == PAGE
