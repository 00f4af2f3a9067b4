"""Who serves a tensor: each operation under one name, in plain torch, Numba and Triton."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys

import pytest
import torch

from tests.kernels.fast import TRITON
from thinwire import kernels
from thinwire.kernels import reference
from thinwire.kernels.reference import bits, matrix, rice, scales, select, sparse

FILES = (bits, matrix, rice, scales, select, sparse)
OPERATIONS = {
    name: file
    for file in FILES
    for name, there in vars(file).items()
    if getattr(there, "__module__", "") == file.__name__ and hasattr(kernels, name)
}
TORCH_ON_CUDA = {
    "add_outer", "project", "project_back",
    "ascending", "bf16_decode", "bf16_encode", "bitmap_decode", "bitmap_encode", "block_decode",
    "block_encode", "compress", "either", "finite", "gather", "half_decode", "half_encode",
    "member", "natural_decode", "natural_encode", "onebit_encode", "pack", "rice_decode",
    "rice_encode", "rice_size", "sign_encode", "unpack",
}  # fmt: skip


def form(name: str, room: str) -> object:
    module = OPERATIONS[name].__name__.replace(reference.__name__, f"thinwire.kernels.{room}")
    there = importlib.util.find_spec(module)
    return getattr(importlib.import_module(module), name, None) if there else None


def test_every_operation_is_found():
    public = {name for name, there in vars(kernels).items() if hasattr(there, "__wrapped__")}
    assert set(OPERATIONS) == public
    assert len(OPERATIONS) == 38


@pytest.mark.parametrize("name", OPERATIONS)
def test_all_forms_take_the_same(name):
    spec = getattr(OPERATIONS[name], name)
    given = [(p.name, p.default) for p in inspect.signature(spec).parameters.values()]
    for room in ("cpu", "gpu") if TRITON else ("cpu",):
        fast = form(name, room)
        if room == "gpu" and name in TORCH_ON_CUDA:
            assert fast is None
            continue
        there = inspect.signature(fast).parameters.values()
        assert [(p.name, p.default) for p in there] == given
    assert inspect.signature(getattr(kernels, name)) == inspect.signature(spec)
    assert spec.__doc__


@pytest.mark.parametrize("name", sorted(TORCH_ON_CUDA))
def test_what_has_no_triton_form_is_plain_torch_on_cuda(name):
    spec = getattr(OPERATIONS[name], name)
    assert kernels._find(spec, "cuda") is spec


def test_what_a_fast_form_cannot_read_goes_to_plain_torch():
    """Numba would refuse another type, and a view of what does not lie in one piece."""
    rows, at = torch.arange(12.0).view(3, 4), torch.tensor([1])
    assert kernels.topk(rows.t(), 1).tolist() == [2, 5, 8, 11]
    assert kernels.topk(rows.double(), 1).tolist() == [3, 7, 11]
    assert kernels.finite(rows.half())
    assert kernels.gather(rows[:, 2], at).tolist() == [6]
    assert kernels.scatter_add(torch.zeros(2).double(), at, torch.ones(1)).tolist() == [0, 1]
    assert kernels.scatter_add(torch.zeros(2), at, torch.ones(1).double()).tolist() == [0, 1]
    assert kernels.ascending(torch.arange(6)[::2], 6)
    assert kernels.ascending(torch.arange(6, dtype=torch.int32), 6)


@pytest.mark.parametrize("other", [lambda x: x.double(), lambda x: x.repeat_interleave(2)[::2]])
def test_one_list_that_a_fast_form_cannot_read_is_enough(other):
    index, one = [torch.tensor([0, 2]), torch.tensor([2, 3])], torch.ones(2)
    where, total = kernels.merged(index, [one, other(one)])
    assert where.tolist() == [0, 2, 3]
    assert total.tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    ("kind", "expected"), [("cpu", "cpu"), ("cuda", "gpu" if TRITON else None), ("meta", None)]
)
def test_a_kind_of_device_has_its_room(kind, expected):
    found = kernels._find(select.topk, kind)
    room = f"thinwire.kernels.{expected or 'reference'}.select"
    assert found.__module__ == room


def test_importing_thinwire_does_not_load_the_compiler():
    code = "import sys, thinwire; thinwire.attach; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
