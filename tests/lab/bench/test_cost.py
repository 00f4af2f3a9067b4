"""What a recipe costs: phases add up to `reduce`, and time goes where it is spent."""

from __future__ import annotations

import pytest

from thinwire_lab.bench import cost


def test_a_bad_call_is_refused_before_any_process_is_started():
    with pytest.raises(ValueError, match="density must be in"):
        cost.measure(["distribute: topk(density=2.0)"], 1, cost.Trial(model="small"))


@pytest.mark.parametrize(
    ("file", "function", "phase"),
    [
        ("thinwire/kernels/cpu/scales.py", "int8_encode", "code"),
        ("thinwire/kernels/cpu/scales.py", "scaled", "decode"),
        ("thinwire/wire/rice.py", "decode", "code"),
        ("thinwire/kernels/cpu/select.py", "accumulate", "fold"),
        ("thinwire/kernels/cpu/select.py", "add_topk", "select"),
        ("thinwire/memory.py", "keep", "fold"),
        ("thinwire/kernels/cpu/sparse.py", "filled", "mean"),
        ("thinwire/collectives/gather.py", "sum", "select"),
        ("thinwire/comm/torch.py", "all_gather", "exchange"),
        ("thinwire/engine/lane.py", "_run", "other"),
    ],
)
def test_a_function_belongs_to_a_phase(file, function, phase):
    assert cost._find_phase((file, 1, function)) == phase


@pytest.mark.slow
def test_phases_add_up_to_what_reduce_takes():
    calls = ["int8()", "distribute: topk(density=0.01)"]
    plain, idle, *rows = cost.measure(calls, 2, cost.Trial(model="small", turns=3))
    assert [plain.name, idle.name] == [cost.ALONE, "DDP, sends nothing"]
    assert not plain.phases and not idle.phases
    for row in rows:
        assert sum(row.phases.values()) == pytest.approx(row.reduce)
        assert 0 < row.reduce < plain.step + row.step
        assert row.phases["fold"] > 0 and row.phases["exchange"] > 0
    coded, chosen = rows
    assert coded.phases["code"] > chosen.phases["code"]
    assert chosen.phases["select"] > 0
