"""The house rules: who may import whom, what `import thinwire` costs, what files must say."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire
import thinwire_lab

ROOT = Path(thinwire.__file__).parent
LAB = Path(thinwire_lab.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LAB_FILES = sorted(LAB.rglob("*.py"))
# Lower rooms first; a file imports from its own room and from lower ones only.
ROOMS = [
    {"state", "layout", "scratch", "kernels", "operand", "bucket", "payload", "protocols",
     "schedule", "describe", "spelling", "evidence"},
    {"comm", "wire", "collectives", "selectors", "frames", "memory", "reducers", "remember",
     "combinators", "deliver", "route", "choose", "partial", "by_node"},
    {"recipes"},
    {"plan"},
    {"engine"},
]  # fmt: skip
LAB_ROOMS = [{"errors"}, {"files"}, {"local"}, {"jobs"}, {"runs"}, {"simulate"},
             {"bench", "proofs", "trace"}, {"report"}, {"cli"}]  # fmt: skip
SEAM = {
    "selectors",
    "frames",
    "collectives",
    "memory",
    "reducers",
    "remember",
    "combinators",
    "route",
    "choose",
    "deliver",
    "by_node",
    "partial",
    "bucket",
    "wire",
}


def room_of(path: Path) -> str:
    home = ROOT if path.is_relative_to(ROOT) else LAB
    return path.relative_to(home).parts[0].removesuffix(".py")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT.parent))


def imports(path: Path) -> set[str]:
    """Modules imported when the code runs (type-only imports do not count)."""
    found = set()
    for node in ast.walk(_without_type_checking(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _without_type_checking(tree: ast.Module) -> ast.Module:
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return tree


def test_every_room_is_known():
    known = set().union(*ROOMS) | {"__init__"}
    assert {room_of(path) for path in FILES} == known
    known = set().union(*LAB_ROOMS) | {"__init__", "__main__"}
    assert {room_of(path) for path in LAB_FILES} == known


@pytest.mark.parametrize("path", FILES + LAB_FILES, ids=named)
def test_imports_go_downwards(path):
    package, rooms = ("thinwire", ROOMS) if path in FILES else ("thinwire_lab", LAB_ROOMS)
    level = {room: number for number, rooms in enumerate(rooms) for room in rooms}
    mine = level.get(room_of(path))
    if mine is None:  # the package itself
        return
    used = {name.split(".")[1] for name in imports(path) if name.startswith(f"{package}.")}
    for room in used & set(level):
        assert level[room] <= mine, f"{path.name} reaches up into {room}"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_library_never_imports_the_laboratory(path):
    assert "thinwire_lab" not in path.read_text().replace("`thinwire_lab", "")


@pytest.mark.parametrize("path", FILES, ids=named)
def test_algorithms_reach_the_network_through_comm_only(path):
    if room_of(path) in SEAM:
        assert not any(name.startswith("torch.distributed") for name in imports(path))


@pytest.mark.parametrize("path", FILES + LAB_FILES, ids=named)
def test_every_file_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", FILES + LAB_FILES, ids=named)
def test_files_and_functions_are_small_and_words_are_ours(path):
    text = path.read_text()
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name
            forbidden = {"ctx", "manager", "helper", "utils", "impl", "handler", "compressor"}
            assert not forbidden & set(node.name.split("_")), node.name


def in_a_new_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_import_is_light():
    heavy = "('numba', 'triton', 'matplotlib', 'transformers', 'sklearn', 'rich', 'typer')"
    code = (
        "import sys, time; start = time.process_time(); import torch; before = set(sys.modules); "
        "begin = time.process_time(); import thinwire; thinwire.attach; end = time.process_time(); "
        "print(end - begin, begin - start); "
        f"print([m for m in set(sys.modules) - before if m.split('.')[0] in {heavy}])"
    )
    runs = [in_a_new_python(code).splitlines() for _ in range(3)]
    assert all(run[1] == "[]" for run in runs)
    ours, torchs = min(tuple(map(float, run[0].split())) for run in runs)
    assert ours <= max(0.3, torchs / 5)  # a busy machine is slow with both


@pytest.mark.slow
def test_import_configures_no_logging():
    assert in_a_new_python("import logging, thinwire; print(logging.root.handlers)") == "[]\n"
