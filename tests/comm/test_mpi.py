"""The MPI transport, under a real mpirun: the same verbs, the same means as in threads."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.mpi_check import CALLS
from thinwire_lab.bench.collectives import mpirun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: install openmpi-bin"),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py not installed"),
]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("world", [1, 3, 4])
def test_recipes_over_mpi(world):
    done = subprocess.run(
        [*mpirun(world), sys.executable, "-m", "tests.comm.mpi_check"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{len(CALLS)} recipes over {world} MPI ranks" in done.stdout
