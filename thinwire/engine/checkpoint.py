"""What a saved state looks like, and what makes one unfit to load.

Plain dicts, tensors, numbers and strings, keyed by parameter name, so that it loads with
`weights_only=True` and does not depend on how DDP cut its buckets. A digest over all of it is part
of it: a flipped bit is found before anything is loaded.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.layout import Slot

log = logging.getLogger(__name__)

VERSION = 3
_TREES = ("slots", "layouts")
_KINDS: dict[str, type] = {
    **dict.fromkeys(("rank", "world", "step"), int),
    **dict.fromkeys(("recipe", "digest"), str),
    **dict.fromkeys(("next", "buckets"), list),
    **dict.fromkeys(("shapes", "slots", "layouts"), dict),
}


def copy_trees(state: Mapping[str, Any]) -> dict[str, Any]:
    """The trees of a state with tensors of their own."""
    return {tree: _copy(state.get(tree, {})) for tree in _TREES}


def sign(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with a digest over all else that is in it."""
    return {**state, "digest": _digest(state)}


def keep_residual(state: Mapping[str, Any], recipe: str) -> Mapping[str, Any]:
    """The state for this recipe: of another one's, what waits to be sent and nothing else."""
    if state["recipe"] == recipe:
        return state
    log.warning("loading the state of another recipe; its residual is kept. saved: %s, now: %s",
                state["recipe"], recipe)  # fmt: skip
    slots = {
        name: {path: values for path, values in parts.items() if _is_memory(path)}
        for name, parts in state["slots"].items()
    }
    return {**state, "slots": slots, "layouts": {}}


def check(state: Mapping[str, Any], rank: int, world: int, slots: Mapping[str, Slot]) -> None:
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
    _check_shapes(state["shapes"], slots)
    _check_buckets(state, slots)
    most = torch.finfo(torch.float32).max / (2 * world)  # a sum over ranks has room for it
    for name, parts in state["slots"].items():
        if name not in slots:
            raise ValueError(f"the state is damaged: it has no shape of {name!r}")
        _check_parts(name, parts, slots[name], most)
    for parts in state["layouts"].values():
        _check_parts("a bucket", parts, None, most)
    if _digest(state) != state["digest"]:
        raise ValueError(
            "the state is damaged: it is not what sync.state_dict() returned, for its digest "
            "differs; load another checkpoint"
        )


def shapes(slots: Mapping[str, Slot]) -> dict[str, list[int]]:
    """What a state is of: every parameter and its shape."""
    return {name: list(slot.shape) for name, slot in slots.items()}


def _check_shapes(saved: Mapping[Any, Any], slots: Mapping[str, Slot]) -> None:
    """Parameters that were frozen when it was saved may have come in since."""
    now = shapes(slots)
    for name, shape in saved.items():
        if not isinstance(shape, list) or now.get(name) != shape:
            raise ValueError(
                f"the state is of another model: it has {name!r} of shape {shape!r:.60}, this "
                f"model {now.get(name, 'has no such parameter')}; load the state that was saved "
                "with this model"
            )


def _check_buckets(state: Mapping[str, Any], slots: Mapping[str, Slot]) -> None:
    for key in ("next", "buckets"):
        groups = state[key]
        listed = all(isinstance(group, list | tuple) and group for group in groups)
        names = [name for group in groups for name in group] if listed else []
        known = all(isinstance(name, str) and name in slots for name in names)
        if not listed or not known or len(set(names)) < len(names):
            raise ValueError(
                f"the state is damaged: {key} must be lists of this model's parameters, each once, "
                f"got {groups!r:.60}; load another checkpoint"
            )


def _check_parts(name: str, parts: Any, slot: Slot | None, most: float) -> None:
    if not isinstance(parts, Mapping) or not all(isinstance(v, Mapping) for v in parts.values()):
        raise ValueError(f"what the state has for {name!r} is damaged; load another checkpoint")
    for part, values in parts.items():
        for key, value in values.items():
            if isinstance(value, Tensor | float) and not _within(torch.as_tensor(value), most):
                raise ValueError(
                    f"{key} of {name!r} is not finite, or too large for a sum over ranks (above "
                    f"{most:.1e}); load another checkpoint"
                )
            if slot is None or not _is_memory(part) or not isinstance(value, Tensor):
                continue
            if tuple(value.shape) != slot.shape:
                raise ValueError(
                    f"{key} of {name!r} has shape {tuple(value.shape)}, the parameter has "
                    f"{slot.shape}; load the state that was saved with this model"
                )


def _within(value: Tensor, most: float) -> bool:
    """Finite, and small enough for what is done with it."""
    if not value.is_floating_point() or not value.numel():
        return True
    return kernels.finite(value.reshape(-1).float()) and float(value.abs().max()) <= most


def _is_memory(path: Any) -> bool:
    return str(path).split("/")[-1] == "memory"


def _digest(state: Mapping[str, Any]) -> str:
    made = hashlib.sha256()
    _feed(made, {key: value for key, value in state.items() if key != "digest"})
    return made.hexdigest()


def _feed(made: Any, thing: Any) -> None:
    if isinstance(thing, Mapping):
        made.update(f"dict {len(thing)} ".encode())
        for key in sorted(thing, key=repr):
            _feed(made, key)
            _feed(made, thing[key])
    elif isinstance(thing, list | tuple):
        made.update(f"list {len(thing)} ".encode())
        for item in thing:
            _feed(made, item)
    elif isinstance(thing, Tensor):
        flat = thing.detach().cpu().contiguous().reshape(-1)
        made.update(f"{thing.dtype} {tuple(thing.shape)} ".encode())
        made.update(flat.view(torch.uint8).numpy())
    elif isinstance(thing, str | int | float | None):
        made.update(f"{type(thing).__name__} {thing!r} ".encode())
    else:
        raise ValueError(f"the state is damaged: it holds a {type(thing).__name__}")


def _copy(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _copy(value) for key, value in tree.items()}
    return tree.detach().clone() if isinstance(tree, Tensor) else tree
