"""The code of every page, run as it stands on two ranks."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire
from tests.integration.common import WIDTH, batch, ddp, mlp, train, weights
from tests.processes import Pool, WorkerError

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PAGES = {path.stem: path for path in sorted((ROOT / "docs").glob("*.md"))}
PAGES["README"] = ROOT / "README.md"
SCRIPT = "init_process_group"  # what makes a block a script of its own
STEPS = 6


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGES[page].read_text(), re.MULTILINE | re.DOTALL)


def parts(page: str) -> list[str]:
    return [code for code in blocks(page) if SCRIPT not in code]


def run_page(rank: int, world: int, codes: list[str], folder: str) -> list[dict[str, Any]]:
    """The blocks of a page one after the other, and for each of them what it left behind.

    A block knows what those before it have defined. It is given a network, DDP around it, an
    optimizer, data, and, if it attaches none itself, a session that has taken a step.
    """
    known: dict[str, Any] = {"torch": torch, "thinwire": thinwire, "rank": rank, "steps": STEPS}
    with contextlib.chdir(folder):
        return [run_block(known, code) for code in codes]


def run_block(known: dict[str, Any], code: str) -> dict[str, Any]:
    net, rank = mlp(3), known["rank"]
    known["net"] = known["model"] = net
    if "distribute(" not in code:
        known["model"] = ddp(net)
    known["optimizer"] = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    known["loader"] = [(batch(rank, step), torch.zeros(4, WIDTH)) for step in range(2)]
    known["loss_fn"] = torch.nn.functional.mse_loss
    attaches = re.search(r"\b(attach|distribute)\(", code) is not None
    if not attaches:
        known["sync"] = thinwire.attach(known["model"], "int8()", known["optimizer"])
        train(known["model"], known["optimizer"], rank, 1)
    before = weights(net)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, known)
    if attaches:  # what it has set up takes some steps
        train(known["model"], known["optimizer"], rank, STEPS)
    sync = known.pop("sync", None)
    figures = {} if sync is None else sync.metrics()
    if sync is not None and sync.attached:
        sync.detach()
    moved = not torch.equal(weights(net), before)
    return {"attaches": attaches, "weights": weights(net), "moved": moved,
            "results": known.pop("results", None), **figures}  # fmt: skip


@pytest.mark.parametrize("page", [page for page in PAGES if parts(page)])
def test_the_code_of_a_page_runs(pool: Pool, page: str, tmp_path: Path) -> None:
    """Replicas stay bit-identical, whatever the page does with them."""
    first, second = pool.run(2, run_page, parts(page), str(tmp_path))
    for here, there in zip(first, second, strict=True):
        assert torch.equal(here["weights"], there["weights"])
        assert here["moved"] or not here["attaches"]
        assert here.get("bytes_sent", 1) > 0


def run_scripts(rank: int, world: int, codes: list[str]) -> str:
    """As torchrun would, in a group that is there already and stays; what they have printed."""
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as printed:
        patch.setattr(dist, "init_process_group", lambda backend: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        with contextlib.redirect_stdout(printed):
            for code in codes:
                exec(code, {"__name__": "__main__"})
        return printed.getvalue()


@pytest.mark.parametrize("page", [page for page in PAGES if parts(page) != blocks(page)])
def test_the_scripts_of_a_page_run(pool: Pool, page: str) -> None:
    scripts = [code for code in blocks(page) if SCRIPT in code]
    for rank, printed in enumerate(pool.run(2, run_scripts, scripts)):
        assert printed.count(f"rank {rank} of 2") == len(scripts)


def test_a_selector_of_ones_own_has_fifteen_lines() -> None:
    lines = [line for line in blocks("adding-your-own")[0].splitlines() if line.strip()]
    assert len(lines) <= 15, "fifteen lines, outside the package"


def test_the_threads_of_the_page_obey_the_law(pool: Pool, tmp_path: Path) -> None:
    left = pool.run(2, run_page, parts("adding-your-own")[1:2], str(tmp_path))[0]
    results = left[0]["results"]
    average = sum(sent for _, sent in results) / 4
    assert all(torch.equal(mean, results[0][0]) for mean, _ in results)
    assert torch.allclose(results[0][0], average, atol=1e-6)


def test_settings_that_keep_accuracy_send_what_they_say(pool: Pool, tmp_path: Path) -> None:
    left = pool.run(2, run_page, parts("choosing"), str(tmp_path))[0][-1]
    assert 0.15 < left["density"] < 0.4  # a ramp, and all of it in the last step


def test_a_page_whose_code_is_wrong_is_found(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="unknown recipe"):
        pool.run(2, run_page, ["thinwire.recipes.elephant()"], str(tmp_path))
