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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
PAGE = Path(__file__).parents[2] / "docs" / "adding-your-own.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


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
