"""State is kept by parameter name, survives new layouts, and changes only when a step commits."""

from __future__ import annotations

import torch

from thinwire.layout import Layout
from thinwire.state import RowsOf, State, merge


def layout_of(*names: str, shape: tuple[int, ...] = (2, 3)) -> Layout:
    return Layout.of({name: torch.empty(shape) for name in names})


def test_flat_memory_follows_its_parameters_into_another_layout():
    root: dict = {}
    like = torch.empty(0)
    first = State(root, None, layout_of("a", "b", "c"), "memory").flat("residual", like)
    first.copy_(torch.arange(18.0))
    again = State(root, None, layout_of("a", "b", "c"), "memory").flat("residual", like)
    assert again.data_ptr() == first.data_ptr(), "nothing is copied while the layout stays"
    other = State(root, None, layout_of("c", "a"), "memory").flat("residual", like)
    assert other.tolist() == [*range(12, 18), *range(6)]
    other[0] = 99.0
    assert root["slots"]["c"]["memory"]["residual"][0, 0] == 99.0
    assert root["slots"]["b"]["memory"]["residual"].tolist() == [[6, 7, 8], [9, 10, 11]]


def test_a_draft_is_seen_at_once_and_kept_on_merge_only():
    root: dict = {}
    layout = layout_of("a")
    draft: dict = {}
    state = State(root, draft, layout, "select")
    state["threshold"] = 1.0
    state.of(layout.slots[0])["age"] = 3
    assert state["threshold"] == 1.0
    assert State(root, None, layout, "select").get("threshold") is None
    merge(root, draft)
    assert State(root, None, layout, "select")["threshold"] == 1.0
    assert State(root, None, layout, "select").of(layout.slots[0]) == {"age": 3}


def test_parts_do_not_see_each_other():
    root: dict = {}
    layout = layout_of("a")
    State(root, None, layout, "yes/select")["x"] = 1
    assert "x" not in State(root, None, layout, "no/select")
    assert list(State(root, None, layout, "yes/select")) == ["x"]


def test_flat_memory_survives_a_draft_that_was_opened_before():
    root: dict = {}
    layout, draft = layout_of("a"), {}
    state = State(root, draft, layout, "memory")
    state.of(layout.slots[0])["note"] = 1
    state.flat("residual", torch.empty(0)).fill_(7.0)
    merge(root, draft)
    assert root["slots"]["a"]["memory"]["residual"].eq(7).all()


def test_rows_of_a_layer_find_their_own_entries_again():
    layer: dict = {}
    top, bottom = RowsOf(layer, 0, 2, 5), RowsOf(layer, 2, 5, 5)
    top["sign"] = torch.ones(2, 4)
    bottom["sign"] = 2 * torch.ones(3, 4)
    bottom["threshold"] = 0.5
    assert layer["sign"].sum(dim=1).tolist() == [4, 4, 8, 8, 8]
    shifted = RowsOf(layer, 1, 3, 5)
    assert shifted["sign"][:, 0].tolist() == [1, 2]
    assert shifted["threshold"] == 0.5
    assert shifted.get("missing") is None
