"""Where parts keep what they remember between steps: plain dicts of tensors and numbers.

    root = {"slots":   {parameter name: {part: {key: value}}},     survives any layout
            "layouts": {fingerprint:    {part: {key: value}}}}     may be dropped

Parts never see the root. `bucket.scope(part)` hands each a `State`: a dict for what belongs to
the layout, `.of(slot)` for what belongs to one parameter, `.flat(key)` for one number a gradient
entry. In the engine writes go to a *draft* that is merged when the step is committed, so parts
replace tensors instead of changing them; only `flat` memory is changed in place.
"""

from __future__ import annotations

from collections import UserDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from thinwire.layout import Layout, Slot

Root = dict[str, Any]
Draft = dict[tuple[str, str, str], dict[str, Any]]


class State(UserDict[str, Any]):
    """One part's private memory for one bucket: as a dict, what belongs to the layout."""

    def __init__(self, root: Root, draft: Draft | None, layout: Layout, path: str) -> None:
        self._root, self._draft, self._layout, self._path = root, draft, layout, path

    @property
    def layout(self) -> Layout:
        """Of the bucket this belongs to."""
        return self._layout

    @property
    def data(self) -> dict[str, Any]:  # type: ignore[override]  # which a `UserDict` wraps
        return self._open("layouts", self._layout.fingerprint)

    def of(self, slot: Slot) -> dict[str, Any]:
        """What this part keeps for one parameter, whatever bucket it travels in."""
        return self._open("slots", slot.name)

    def flat(self, key: str, like: Tensor) -> Tensor:
        """One number a gradient entry, zero at first, laid out as the bucket; change it in place.

        Stored parameter by parameter; when those pieces no longer lie side by side (new bucket
        layout, loaded state) they are brought together once.
        """
        homes = [self._committed("slots", slot.name) for slot in self._layout.slots]
        whole = _side_by_side([home.get(key) for home in homes], self._layout, like)
        if whole is None:
            whole = torch.zeros(self._layout.numel, dtype=like.dtype, device=like.device)
            for slot, home in zip(self._layout.slots, homes, strict=True):
                mine = slot.view(whole)
                if key in home:
                    mine.copy_(home[key])
                home[key] = mine
                drafted = (self._draft or {}).get(("slots", slot.name, self._path))
                if drafted is not None:
                    drafted[key] = mine
        return whole

    def _committed(self, kind: str, owner: str) -> dict[str, Any]:
        entry = self._root.setdefault(kind, {}).setdefault(owner, {}).setdefault(self._path, {})
        assert isinstance(entry, dict)
        return entry

    def _open(self, kind: str, owner: str) -> dict[str, Any]:
        if self._draft is None:
            return self._committed(kind, owner)
        where = (kind, owner, self._path)
        if where not in self._draft:
            self._draft[where] = dict(self._committed(kind, owner))
        return self._draft[where]


class RowsOf(UserDict[str, Any]):
    """The state of some rows of a layer: tensors that hold one entry a row are cut to these rows.

    A layer whose budget does not divide is seen as row blocks that shift every step; a selector
    that remembers something a row must still find its own rows again.
    """

    def __init__(self, layer: dict[str, Any], start: int, stop: int, rows: int) -> None:
        self.data, self._cut, self._rows = layer, slice(start, stop), rows
        self._count = stop - start

    def __getitem__(self, key: str) -> Any:
        value = self.data[key]
        return value[self._cut] if self._by_row(value, self._rows) else value

    def __setitem__(self, key: str, value: Any) -> None:
        if self._by_row(value, self._count):
            old = self.data.get(key)
            layer = value.new_zeros((self._rows, *value.shape[1:]))
            if isinstance(old, Tensor) and old.shape == layer.shape:
                layer.copy_(old)
            layer[self._cut] = value
            value = layer
        self.data[key] = value

    @staticmethod
    def _by_row(value: Any, rows: int) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def merge(root: Root, draft: Draft) -> None:
    """Commit a step: the draft becomes the state."""
    for (kind, owner, path), values in draft.items():
        root[kind][owner][path] = values


def _side_by_side(parts: list[Tensor | None], layout: Layout, like: Tensor) -> Tensor | None:
    """The flat tensor these pieces are views of, if they lie in it as the layout says."""
    first = parts[0] if parts else None
    if first is None or first.dtype != like.dtype or first.device != like.device:
        return None
    base = first.storage_offset() - layout.slots[0].offset
    room = first.untyped_storage().nbytes() // first.element_size()
    if base < 0 or base + layout.numel > room:
        return None
    storage = first.untyped_storage().data_ptr()
    for part, slot in zip(parts, layout.slots, strict=True):
        if (
            part is None
            or part.untyped_storage().data_ptr() != storage
            or part.storage_offset() != base + slot.offset
            or part.stride() != slot.strides
            or part.shape != slot.shape
        ):
            return None
    return first.as_strided((layout.numel,), (1,), base)
