"""The documentation's code, run as it stands, in real processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.common import ddp, mlp, sgd, train, weights
from tests.processes import Pool
from thinwire import recipes

pytestmark = pytest.mark.slow
DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str = "adding-your-own.md") -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def as_written(rank: int, world: int, code: str) -> Tensor:
    net = mlp(3)
    model = ddp(net)
    exec(code, {"model": model})
    train(model, sgd(net), rank, 6)
    return weights(net)


def test_a_selector_of_ones_own_as_the_page_has_it(pool: Pool) -> None:
    code = blocks()[0]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 15, "fifteen lines, outside the package"
    results = pool.run(2, as_written, code)
    assert torch.equal(*results)
    assert not torch.equal(results[0], weights(mlp(3)))


def test_the_threads_of_the_page() -> None:
    names: dict[str, Any] = {"torch": torch, "recipe": recipes.topk(density=0.05)}
    exec(blocks()[1], names)
    means = [mean for mean, _ in names["results"]]
    average = sum(sent for _, sent in names["results"]) / 4
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert torch.allclose(means[0], average, atol=1e-6)


def with_settings(rank: int, world: int, code: str) -> tuple[Tensor, float]:
    net = mlp(3)
    names: dict[str, Any] = {"net": net, "steps": 6}
    exec(code, names)
    train(names["model"], names["optimizer"], rank, 6)
    return weights(net), float(names["sync"].metrics()["density"])


def test_settings_that_keep_accuracy_as_the_page_has_them(pool: Pool) -> None:
    (first, density), (second, _) = pool.run(2, with_settings, blocks("results.md")[0])
    assert torch.equal(first, second) and not torch.equal(first, weights(mlp(3)))
    assert 0.15 < density < 0.4  # a ramp, and all of it in the last step
