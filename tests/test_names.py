"""Every name that documents and errors use comes from one obvious place, and types accept it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
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
    for name in recipes.COLLECTIVES:
        assert getattr(collectives, name) is not None


ACCEPTED = """
from thinwire import MomentumCorrected, Piecewise, Ramp, Residual, recipes, vectors
from thinwire.collectives import AllGather
recipes.topk(density=Ramp(start=0.25, end=0.01, steps=500), wire="int8+auto")
recipes.topk(0.01, refresh=lambda step: 4, collective="cheapest", partial=True, estimate=False)
recipes.topk({"embed": 0.001, "": Ramp(start=0.25, end=0.01, steps=500)})
recipes.gaussiank(capacity=Ramp(start=2.0, end=1.5, steps=10), memory=Residual(learning_rate=True))
recipes.threshold(value=Piecewise((10,), (0.1, 0.01)))
recipes.powersgd(rank=Piecewise((311,), (16, 512)), memory="momentum")
recipes.qsgd(bits=Piecewise((10,), (8, 4)), block=128, dense=vectors)
recipes.terngrad(clip=None, dense=["norm"])
recipes.dgc(density=0.01, memory=MomentumCorrected(nesterov=True), ramp=[0.25, 0.05], every=10)
recipes.adtopk(0.01, rows="dim1", dense=["^0[.]"], no_feedback=["^14[.]"], interleave=(2, 1))
recipes.gtopk(density=0.01, collective=AllGather(), warmup=100)
recipes.auto(density=0.01, rank=4, among=("dense", "topk"))
"""
REFUSED = """
from thinwire import recipes
recipes.topk(densty=0.01)
recipes.gaussiank(capacity="much")
recipes.int8(wire="bf16")
recipes.gtopk(partial="yes")
recipes.topk(warmup=lambda step: 3)
"""


def refused_by_mypy(calls: str, home: Path) -> list[int]:
    """The lines that the type checker refuses."""
    (home / "calls.py").write_text(calls)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(home / "calls.py")],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert re.search("^(Success|Found)", done.stdout, re.M), done.stdout + done.stderr
    return [int(line) for line in re.findall(r"calls.py:(\d+): error", done.stdout)]


@pytest.mark.slow
def test_types_accept_what_is_documented_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    assert refused_by_mypy(ACCEPTED, tmp_path) == []
    lines = enumerate(REFUSED.splitlines(), 1)
    wrong = [number for number, line in lines if line.startswith("recipes.")]
    assert refused_by_mypy(REFUSED, tmp_path) == wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_imports_of_the_documents_work(page: Path) -> None:
    text = page.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S) if page.suffix == ".md" else [text]
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("thinwire"):
                exec(ast.unparse(node), {})
