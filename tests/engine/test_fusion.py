"""Packing: every parameter once, in order, and no bucket fuller than it must be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import recipes
from thinwire.engine.fusion import MB, pack, pack_by_counts

sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=20)


@given(sizes=sizes, kb=st.floats(0.01, 20.0), two=st.booleans())
@settings(max_examples=80)
def test_every_parameter_once_and_caps_kept(sizes, kb, two):
    kinds = (torch.float32, torch.float64) if two else (torch.float32,)
    parameters = {
        f"p{i}": torch.empty(shape, dtype=kinds[i % len(kinds)]) for i, shape in enumerate(sizes)
    }
    layouts = pack(parameters, recipes.dense(), kb / 1024)
    names = [slot.name for layout in layouts for slot in layout.slots]
    assert sorted(names) == sorted(parameters)
    for layout in layouts:
        assert len({parameters[slot.name].dtype for slot in layout.slots}) == 1
        order = [int(slot.name[1:]) for slot in layout.slots]
        assert order == sorted(order, reverse=True)
        if not two:
            fits = layout.numel * 4 <= kb * 1024 * 1.0001
            assert fits or len(layout.slots) == 1


def test_compressed_buckets_are_as_many_as_ddps():
    """The cap is translated: 25 MB of gradient is 25 MB of gradient, whatever is sent for it."""
    parameters = {f"w{i}": torch.empty(1024, 1024, device="meta") for i in range(24)}
    for recipe in (recipes.dense(), recipes.acpsgd(rank=4), recipes.topk(0.01)):
        assert [len(layout.slots) for layout in pack(parameters, recipe, 25.0)] == [6, 6, 6, 6]
    assert len(pack(parameters, recipes.acpsgd(4), 1e-6)) == 24
    assert len(pack(parameters, recipes.acpsgd(4), 1e6)) == 1


def test_a_bucket_is_filled_by_what_is_sent():
    """An embedding that compresses well leaves room for more."""
    parameters = {"wide": torch.empty(64, 4096), "bias": torch.empty(200_000)}
    cap = 0.5 * (64 * 4096 + 200_000) * 4 / MB
    assert len(pack(parameters, recipes.dense(), cap)) == 2
    by_sent = pack(parameters, recipes.acpsgd(rank=1), cap)
    assert [[s.name for s in layout.slots] for layout in by_sent] == [["bias"], ["wide"]]
    many = {f"wide{i}": torch.empty(64, 4096) for i in range(4)} | {"bias": torch.empty(262_144)}
    held = sum(p.numel() * 4 for p in many.values()) / MB
    by_size = pack(many, recipes.dense(), 0.5 * held)
    assert [len(layout.slots) for layout in by_size] == [2, 2, 1]
    # one factor of a wide matrix is a percent of it: all four fit beside each other
    assert [len(layout.slots) for layout in pack(many, recipes.acpsgd(1), 0.5 * held)] == [1, 4]


def test_a_plan_says_how_many_go_together():
    parameters = {f"p{i}": torch.empty(i + 1) for i in range(5)}
    layouts = pack_by_counts(parameters, [2, 3])
    assert [[s.name for s in layout.slots] for layout in layouts] == [
        ["p4", "p3"],
        ["p2", "p1", "p0"],
    ]
    with pytest.raises(ValueError, match="plan again"):
        pack_by_counts(parameters, [2, 2])
    parameters["p3"] = parameters["p3"].double()
    with pytest.raises(ValueError, match="mixes 2"):
        pack_by_counts(parameters, [2, 3])
