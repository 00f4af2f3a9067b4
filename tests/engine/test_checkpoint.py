"""Whatever became of a saved state is found before anything of it is loaded."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
import torch

from thinwire.engine import checkpoint
from thinwire.layout import Layout

LAYOUT = Layout.of({"w": torch.empty(40, 30), "b": torch.empty(30)})
SLOTS = {slot.name: slot for slot in LAYOUT.slots}


def whole() -> dict[str, Any]:
    """As `sync.state_dict()` makes it."""
    draw = torch.Generator().manual_seed(0)
    slots = {
        name: {
            "memory": {"residual": torch.randn(slot.shape, generator=draw)},
            "frame": {"basis": torch.randn(7, 2, generator=draw), "side": 1, "seen": True},
        }
        for name, slot in SLOTS.items()
    }
    layouts = {"f00": {"select": {"threshold": 0.25, "note": None, "half": torch.ones(3).half()}}}
    return checkpoint.sign(
        {"version": checkpoint.VERSION, "recipe": "topk", "world": 2, "rank": 0, "step": 5,
         "shapes": {"w": [40, 30], "b": [30]},
         "next": [["b", "w"]], "buckets": [["b"], ["w"]], "slots": slots, "layouts": layouts}
    )  # fmt: skip


def check(state: Any) -> None:
    checkpoint.check(state, 0, 2, SLOTS)


def written(state: Any) -> bytearray:
    file = io.BytesIO()
    torch.save(state, file)
    return bytearray(file.getvalue())


def read(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def test_a_state_survives_being_saved_in_any_order_and_layout_of_memory() -> None:
    state = read(written(whole()))
    check(state)
    turned = state["slots"]["w"]["memory"]["residual"].t().contiguous().t()
    state["slots"]["w"]["memory"]["residual"] = turned
    check(dict(reversed(state.items())))


def test_no_flipped_bit_and_no_zeroed_page_of_a_saved_file_goes_unnoticed() -> None:
    original = written(whole())
    draw = random.Random(0)
    refused = 0
    for turn in range(300):
        damaged = bytearray(original)
        place = draw.randrange(len(damaged))
        if turn % 10:
            damaged[place] ^= 1 << draw.randrange(8)
        else:
            damaged[place : place + 512] = bytes(len(damaged[place : place + 512]))
        try:
            state = read(bytes(damaged))
        except Exception:  # torch itself has noticed; a flipped pickle may say anything
            continue
        try:
            check(state)
        except ValueError:
            refused += 1
            continue
        assert same(state, read(bytes(original))), "what is loaded is what was saved"
    assert refused > 100


def changed(state: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *inner, last = path.split("/")
    place = state
    for key in inner:
        place = place[key]
    place[last] = value
    return state


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [("slots", {}, "digest differs"),
     ("slots/w/frame/basis", torch.ones(3), "digest differs"),
     ("slots/w/frame/side", 0, "digest differs"),
     ("slots/w/frame/seen", 1, "digest differs"),
     ("layouts", {}, "digest differs"),
     ("layouts/f00/select/threshold", 0.5, "digest differs"),
     ("layouts/f00/select/threshold", "half", "digest differs"),
     ("recipe", "gtopk", "digest differs"),
     ("step", 6, "digest differs"),
     ("buckets", [["w"], ["b"]], "digest differs"),
     ("digest", "0" * 64, "digest differs"),
     ("extra", 1, "digest differs"),
     ("extra", object(), "holds a object"),
     ("shapes/w", [40, 31], r"'w' of shape \[40, 31\], this model \[40, 30\]"),
     ("shapes/v", [3], "'v' of shape .*this model has no such parameter"),
     ("shapes/w", torch.ones(3), "'w' of shape tensor"),
     ("shapes", {}, "no shape of 'w'|digest differs"),
     ("digest", None, "digest must be a str"),
     ("next", [["b", "b"]], "next must be lists of this model's parameters"),
     ("buckets", [[]], "buckets must be lists"),
     ("buckets", [[{}]], "buckets must be lists"),
     ("buckets", [["stranger"]], "buckets must be lists"),
     ("buckets", ["w"], "buckets must be lists"),
     ("slots/w/frame", 5, "what the state has for 'w' is damaged"),
     ("slots/w/memory/residual", torch.full((40, 30), 1e38), "too large for a sum over ranks"),
     ("slots/w/frame/basis", torch.full((7, 2), float("inf")), "basis of 'w' is not finite"),
     ("layouts/f00/select/threshold", float("nan"), "threshold of 'a bucket' is not finite"),
     ("layouts/f00", [], "what the state has for 'a bucket' is damaged"),
     ("slots/w/memory/residual", torch.ones(3), r"has shape \(3,\), the parameter has")],
)  # fmt: skip
def test_what_is_not_as_it_was_saved_is_refused_in_one_line(
    path: str, value: Any, message: str
) -> None:
    state = changed(whole(), path, value)
    with pytest.raises(ValueError, match=message) as refused:
        check(state)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [("slots/w/memory/residual", torch.full((40, 30), 1e38)), ("buckets", [["stranger"]]),
     ("slots/w/memory/residual", torch.ones(3)), ("layouts/f00/select/threshold", float("inf"))],
)  # fmt: skip
def test_a_digest_does_not_excuse_what_cannot_be_used(path: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"^(?!.*digest differs)"):
        check(checkpoint.sign(changed(whole(), path, value)))


def test_of_another_recipes_state_only_what_waits_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = whole()
    assert checkpoint.keep_residual(state, "topk") is state
    other = checkpoint.keep_residual(state, "acpsgd")
    assert {name: set(parts) for name, parts in other["slots"].items()} == {
        "w": {"memory"}, "b": {"memory"}
    }  # fmt: skip
    assert other["layouts"] == {} and other["step"] == 5
    assert "its residual is kept. saved: topk, now: acpsgd" in caplog.text
