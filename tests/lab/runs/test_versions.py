"""Results carry the version of the code that gave them."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path

import torch

import thinwire
from tests.lab.runs.test_ledger import line
from thinwire_lab import files
from thinwire_lab.report import summary
from thinwire_lab.runs import ledger
from thinwire_lab.runs.versions import _commit, versions


def git(folder: Path, *call: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", "-C", str(folder), *who, *call], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_every_line_has_the_versions_and_no_table_shows_them(tmp_path):
    book = tmp_path / ledger.NAME
    ledger.append(book, line("dense()", 0, 0.5))
    written = json.loads(book.read_text())["versions"]
    assert written == versions()
    assert (written["thinwire"], written["torch"]) == (thinwire.__version__, torch.__version__)
    shown = str(summary.tables(ledger.read([book])))
    assert not [text for text in written.values() if text in shown]


def test_lines_without_them_still_load_and_are_the_same_run(tmp_path):
    book = tmp_path / ledger.NAME
    old = files.nan_to_null(asdict(line("dense()", 0, 0.5)))
    del old["versions"]
    book.write_text(json.dumps(old) + "\n")
    ledger.append(book, line("dense()", 0, 0.6))
    (found,) = ledger.read([book])
    assert found.outcome.figures["accuracy"] == 0.6 and found.versions == versions()


def test_the_commit_is_that_of_a_checkout_of_our_own(tmp_path):
    """An environment may lie in a repository of the user's."""
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "one")
    (tmp_path / "site-packages").mkdir()
    assert _commit(tmp_path / "site-packages") == ""
    head = git(tmp_path, "rev-parse", "HEAD")
    assert _commit(tmp_path) == head[:12]
    (tmp_path / "file").write_text("two")
    assert _commit(tmp_path) == f"{head[:12]}-dirty"
