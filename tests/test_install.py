"""What a fresh machine installs: the pins of constraints.txt, for every Python we claim."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CLAIMED = [
    found[1]
    for text in PROJECT["project"]["classifiers"]
    if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", text))
]
CUDA = re.compile(r"(nvidia|cuda)-")  # of torch's published wheel, which pins them itself
UNREACHABLE = re.compile(r"Failed to fetch|error sending request|dns error|timed out", re.I)
LIMIT = 150  # seconds; metadata alone is read, and kept by uv


def test_what_is_claimed_is_one_thing() -> None:
    """The least Python wherever it is named, and the torch that constraints.txt installs."""
    least = CLAIMED[0]
    assert PROJECT["project"]["requires-python"] == f">={least}"
    assert PROJECT["tool"]["mypy"]["python_version"] == least
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + least.replace(".", "")
    (torch,) = (d for d in PROJECT["project"]["dependencies"] if d.startswith("torch"))
    assert f"torch=={torch.removeprefix('torch>=')}." in (ROOT / "constraints.txt").read_text()
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"Python {', '.join(CLAIMED[:-1])} or {CLAIMED[-1]}" in readme


@pytest.mark.slow
@pytest.mark.parametrize("python", CLAIMED)
def test_the_constraints_resolve(python: str) -> None:
    """With the published torch, which needs more than a CPU build; to these pins and no others."""
    pins = _names((ROOT / "constraints.txt").read_text())
    installed = _names(_resolved(python))
    assert pins <= installed, f"pins that nothing needs: {sorted(pins - installed)}"
    loose = {name for name in installed - pins if not CUDA.match(name)}
    assert not loose, f"not in constraints.txt: {sorted(loose)}"


@pytest.mark.slow
def test_what_is_skipped_for_a_missing_package_is_told_at_the_end() -> None:
    """By count and reason, above pytest's closing line; .ci/run ends with it."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/comm/test_mpi.py", "-p", "no:cacheprovider"],
        cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PATH": str(Path(sys.executable).parent)},
    )  # fmt: skip
    told, closing = done.stdout.splitlines()[-2:]
    assert re.fullmatch(r"SKIPPED \[3\] tests/comm/test_mpi.py:\d+: no mpirun: .+", told), told
    assert closing.startswith("3 skipped in"), closing
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "make test"


def test_every_package_that_ci_installs_is_named_where_a_test_skips_without_it() -> None:
    (wanted,) = re.findall(r'wanted="(.+)"', (ROOT / ".ci/run").read_text())
    reasons = [*(ROOT / "tests").rglob("test_*.py"), ROOT / "thinwire_lab" / "local" / "netns.py"]
    text = "".join(path.read_text() for path in reasons)
    assert not [name for name in wanted.split() if f": install {name}" not in text]


def _resolved(python: str) -> str:
    """What pip would install of wheels on Linux; a skip where no registry answers."""
    uv = shutil.which(
        "uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if uv is None:
        pytest.skip("uv is not installed: make setup")
    try:
        done = subprocess.run(
            [uv, "pip", "compile", "-q", "--no-annotate", "--no-header", "--extra", "dev",
             "--python-version", python, "--python-platform", "x86_64-manylinux_2_28",
             "--only-binary", ":all:", "-c", "constraints.txt", "pyproject.toml"],
            cwd=ROOT, capture_output=True, text=True, timeout=LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        pytest.skip(f"the package registry took more than {LIMIT} s")
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip("no package registry can be reached")
    assert done.returncode == 0, done.stderr
    return done.stdout


def _names(pinned: str) -> set[str]:
    """As registries write them: constraints.txt has them as their authors do."""
    return {
        re.sub(r"[-_.]+", "-", name).lower() for name in re.findall(r"^([\w.-]+)==", pinned, re.M)
    }
