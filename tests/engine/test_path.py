"""A newcomer can follow one bucket: from the hook to the parameter through few files.

docs/architecture.md draws this way, file by file; both are held together here.
"""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.processes import Pool

ROOT = Path(thinwire.__file__).parent
PAGE = ROOT.parent / "docs" / "architecture.md"
# 20 files without kernels. Fewer would put two ideas into one file: each is a noun of the
# architecture: socket, lane, steps, peers; memory, sum, state; selector, collective; link, codes,
# meter, transport.
MOST = 20


def files_of_a_step(rank: int, world: int) -> list[str]:
    """Those in which a function is called, in the order of the first call, by hook and lane."""
    seen: dict[str, None] = {}
    profiled = False

    def note(frame: Any, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if profiled and event == "call" and path.startswith(str(ROOT)):
            thread = threading.current_thread()
            if thread is threading.main_thread() or thread.name == "thinwire lane":
                seen.setdefault(str(Path(path).relative_to(ROOT)))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with thinwire.attach(model, thinwire.recipes.topk(), optimizer):
            for step in range(4):
                profiled = step == 3  # DDP has its buckets, and guesses have settled
                optimizer.zero_grad()
                model(torch.randn(8, 64)).square().sum().backward()
                optimizer.step()
            profiled = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return list(seen)


@pytest.mark.slow
def test_a_bucket_passes_through_few_files_and_all_are_drawn(pool: Pool) -> None:
    for files in pool.run(2, files_of_a_step):
        ours = [name for name in files if not name.startswith("kernels/")]
        assert len(ours) <= MOST, ours
        way = PAGE.read_text().partition("## The way of one bucket")[2].partition("\n## ")[0]
        drawn = re.findall(r"`([\w/]+\.py)`", way)
        assert sorted(set(drawn)) == sorted(ours)
