"""Pages in a real browser, headless and without a network: they are drawn, and ask for nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from thinwire_lab.proofs.observe import Note
from thinwire_lab.proofs.study import Proof
from thinwire_lab.proofs.verdict import verdicts
from thinwire_lab.report import comparison, page, proof, style

pytest.importorskip("matplotlib")
image = pytest.importorskip("PIL.Image")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: install chromium")


@pytest.fixture
def report(tmp_path, entry):
    path = tmp_path / "report.html"
    page.write(comparison.page([entry("dense()", 0.1), entry("topk(density=0.05)", 0.08)]), path)
    return path


def browse(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND", *flags,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.mark.slow
@needs_browser
def test_a_browser_shows_tables_and_drawings(report, tmp_path):
    dom = browse("--dump-dom", report.as_uri()).stdout
    assert dom.count("<svg") == 10 and dom.count("<table") == 1
    assert "topk(density=0.05)" in dom and "90 %" in dom
    for setting, mode in ((1, lambda colour: colour), (0, style.DARK.__getitem__)):
        seen = colours_of(report, tmp_path, f"--blink-settings=preferredColorScheme={setting}")
        for colour in (style.PAPER, *(style.family(r).colour for r in ("dense()", "topk()"))):
            assert rgb(mode(colour)) in seen  # both recipes' curves, on light paper and on dark


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def colours_of(report: Path, folder: Path, flag: str) -> set[tuple[int, ...]]:
    shot = folder / "page.png"
    browse(f"--screenshot={shot}", "--window-size=1200,2600", flag, report.as_uri())
    with image.open(shot) as opened:
        return {colour for _, colour in opened.convert("RGB").getcolors(1 << 24)}


@pytest.mark.slow
@needs_browser
def test_two_charts_stand_in_a_row_and_one_on_a_phone(report, tmp_path):
    """What is wider than the window would make the page scroll: only tables may."""
    script = (
        "<script>document.title = [...document.querySelectorAll('figure')].map("
        "f => f.getBoundingClientRect().left).join() + ' ' + "
        "(document.documentElement.scrollWidth > innerWidth)</script></body>"
    )
    asked = tmp_path / "asked.html"
    asked.write_text(report.read_text().replace("</body>", script))
    for width, columns in ((1280, 2), (500, 1)):  # headless windows are no narrower
        dom = browse("--dump-dom", f"--window-size={width},900", asked.as_uri()).stdout
        lefts, wide = re.search("<title>(.*)</title>", dom)[1].split()
        assert len(set(lefts.split(","))) == columns and wide == "false"


@pytest.mark.slow
@needs_browser
def test_a_browser_shows_proofs(tmp_path):
    note = Note(step=0, name="w", numel=9, rows=3, density=0.1, share=0.1, mass=0.0, lost=0.0,
                strange=0.0, contraction=0.5, bound=0.9, xi=0.3, delta=0.4, residual=0.7, limit=9.0,
                missing=0.0, overlap=0.2)  # fmt: skip
    notes = [replace(note, step=step, xi=0.3 + step / 50) for step in range(12)]
    proven = Proof(recipe="topk(density=0.1)", notes=notes, verdicts=verdicts(notes, 0.25))
    path = tmp_path / "proof.html"
    page.write(proof.page("mlp, tiny, 2 workers", [proven]), path)
    dom = browse("--dump-dom", path.as_uri()).stdout
    assert dom.count("<svg") == 8 and dom.count("<table") == 1
    assert "Violated in topk(density=0.1) (replicas differ by)" in dom


def fetched(address: str, folder: Path) -> set[str]:
    """Hosts that were asked for while a page was open."""
    log = folder / "net.json"
    browse("--dump-dom", f"--log-net-log={log}", address)
    return set(re.findall(r'"url":"https?://([^/"]+)', log.read_text()))


@pytest.mark.slow
@needs_browser
def test_nothing_is_fetched_when_it_is_opened(report, tmp_path):
    curious = tmp_path / "curious.html"
    curious.write_text('<img src="http://elsewhere.example/x.png">')
    own = fetched("about:blank", tmp_path)  # what the browser asks for by itself
    assert fetched(curious.as_uri(), tmp_path) - own == {"elsewhere.example"}
    assert not fetched(report.as_uri(), tmp_path) - own
    text = report.read_text()
    for tag in ("<script", "<link", "<img", "<iframe", "@import", "src=", "url("):
        assert tag not in text.replace("url(#", "")
