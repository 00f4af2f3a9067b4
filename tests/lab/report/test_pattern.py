"""The picture of a trace: drawn for every kind of pattern, whole or not at all."""

from __future__ import annotations

import pytest

from tests.lab.trace.test_patterns import traced

pytest.importorskip("matplotlib")

from thinwire_lab.report.trace import draw


@pytest.mark.parametrize(
    ("call", "world"), [("topk()", 1), ("slots()", 4), ("gtopk(tree=True)", 5), ("spardl()", 9)]
)
def test_a_picture_is_made(call, world, tmp_path):
    draw(traced(call, world)[0], tmp_path / "pattern.png")
    assert (tmp_path / "pattern.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [file.name for file in tmp_path.iterdir()] == ["pattern.png"]
