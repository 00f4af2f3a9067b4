"""What a saved state looks like, and what makes one unfit to load.

Plain dicts, tensors, numbers and strings, keyed by parameter name, so that it loads with
`weights_only=True` and does not depend on how DDP cut its buckets.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from thinwire import kernels
from thinwire.layout import Layout, Slot

log = logging.getLogger(__name__)

VERSION = 1
_TREES = ("slots", "layouts")
_KINDS: dict[str, type] = {
    "rank": int,
    "world": int,
    "step": int,
    "recipe": str,
    "buckets": list,
    "slots": dict,
    "layouts": dict,
}


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """The trees of a state with tensors of their own."""
    return {tree: _copy(state.get(tree, {})) for tree in _TREES}


def check(
    state: Mapping[str, Any], recipe: str, rank: int, world: int, slots: Mapping[str, Slot]
) -> None:
    """Raise ValueError, with the remedy, if this rank cannot go on from this state."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != VERSION:
        raise ValueError(
            f"expected a thinwire state of version {VERSION}, got {version!r}; pass what "
            "sync.state_dict() returned"
        )
    for key, kind in _KINDS.items():
        if not isinstance(state.get(key), kind) or (kind is int and state[key] < 0):
            raise ValueError(
                f"the state is damaged: {key} must be a {kind.__name__}, got "
                f"{state.get(key)!r:.60}; load another checkpoint"
            )
    if (state["rank"], state["world"]) != (rank, world):
        raise ValueError(
            f"this state is rank {state['rank']}'s of {state['world']}, loaded by rank {rank} of "
            f"{world}; a residual belongs to its rank: save and load one state a rank, or start "
            "without it (what was not sent yet is dropped, training goes on)"
        )
    for name, parts in state["slots"].items():
        if name not in slots:
            raise ValueError(f"the state has a parameter {name!r} that this model does not have")
        if not isinstance(parts, Mapping) or not all(
            isinstance(values, Mapping) for values in parts.values()
        ):
            raise ValueError(f"what the state has for {name!r} is damaged; load another checkpoint")
        _check_shapes(name, parts, slots[name])
    if state["recipe"] != recipe:
        log.warning("loading the state of another recipe; its residual is kept. saved: %s, now: %s",
                    state["recipe"], recipe)  # fmt: skip


def packed(slots: list[Slot]) -> Layout:
    """These parameters side by side."""
    placed, offset = [], 0
    for slot in slots:
        placed.append(Slot(slot.name, offset, slot.shape, slot.strides))
        offset += slot.numel
    return Layout(tuple(placed), offset)


def _check_shapes(name: str, parts: Mapping[str, Any], slot: Slot) -> None:
    for part, values in parts.items():
        for key, value in values.items():
            if isinstance(value, Tensor) and not kernels.finite(value.reshape(-1).float()):
                raise ValueError(f"{key} of {name!r} is not finite; load another checkpoint")
            per_entry = part.split("/")[-1] == "memory" and isinstance(value, Tensor)
            if per_entry and tuple(value.shape) != slot.shape:
                raise ValueError(
                    f"{key} of {name!r} has shape {tuple(value.shape)}, the parameter has "
                    f"{slot.shape}; load the state that was saved with this model"
                )


def _copy(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _copy(value) for key, value in tree.items()}
    return tree.detach().clone() if isinstance(tree, Tensor) else tree
