"""Models of a user's: what is wrong with the function is told before any process is started."""

from __future__ import annotations

import pytest

from thinwire_lab.bench import models
from thinwire_lab.errors import Refused

MINE = """
import torch
def right(batch): return torch.nn.Linear(3, 2), torch.randn(batch, 3)
def also(batch, width=3, *, bias=object()): return right(batch)
def nothing(): return right(4)
def two(batch, width): return right(batch)
net = torch.nn.Linear(3, 2)
number = 7
def other(batch): return 7
"""


@pytest.fixture(autouse=True)
def _mine(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("nothing", r"theirs:nothing\(\)"), ("two", r"theirs:two\(batch, width\)"),
     ("net", "a Linear"), ("number", "a int")],
)  # fmt: skip
def test_a_function_of_another_signature_is_refused(name, shown):
    with pytest.raises(ValueError, match=f"function of the batch size alone .* got {shown}$"):
        models.maker(f"theirs:{name}")


def test_a_function_of_the_batch_size_is_taken():
    for name in ("right", "also"):
        net, (inputs,) = models.make(f"theirs:{name}", 5)
        assert net(inputs).shape == (5, 2)


def test_what_it_returns_is_refused_in_one_line():
    with pytest.raises(Refused, match=r"theirs:other must return \(module, inputs\), got int"):
        models.make("theirs:other", 5)
