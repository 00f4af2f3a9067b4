"""Probes on a quadratic: what they measure is what is there, and a broken recipe is caught."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from thinwire import Bucket, recipes
from thinwire.combinators import dense, memories
from thinwire.comm import local
from thinwire.memory import Residual
from thinwire.reducers import Select
from thinwire.remember import Remember
from thinwire_lab.proofs.observe import Observer, observed
from thinwire_lab.proofs.study import Study, divergence, leaves_no_row_out
from thinwire_lab.proofs.verdict import verdicts

SHAPE = (20, 30)


@dataclass(frozen=True)
class Forgetful(Residual):
    """Broken on purpose: what was not sent is dropped."""

    def keep(self, residual, sent, bucket):
        residual.zero_()


def watched(recipe, steps=12, world=3):
    """Descend |w - target|^2 / 2, every rank with a target of its own, and take notes."""

    def work(comm):
        observer = Observer(every=2)
        looked_at = observed(recipe, observer)
        draw = torch.Generator().manual_seed(comm.rank)
        target, w, state = torch.randn(SHAPE, generator=draw), torch.zeros(SHAPE), {}
        for step in range(steps):
            noise = 0.1 * torch.randn(SHAPE, generator=draw)
            bucket = Bucket.of({"w": w - target + noise}, state=state, step=step)
            mean = looked_at.reduce(bucket, comm).mean
            w = w - 0.2 * mean.view(SHAPE)
        return observer.notes

    return local.run(world, work)


def judged(recipe, **options):
    notes = watched(recipe, **options)[0]
    return {v.what: v for v in verdicts(notes, 0.0, bool(memories(recipe)))}


@pytest.mark.parametrize(
    "call",
    ["topk(density=0.05)", "adtopk(density=0.1)", "slots(density=0.05)", "gtopk(density=0.05)",
     "dgc(density=0.05)", "topkdsa(density=0.05)", "randomk(density=0.05)", "acpsgd(rank=2)",
     "powersgd(rank=2)", "int8()", "signsgd()", "onebit()", "sidco(density=0.05)",
     "randomk(density=Piecewise((18,), (0.02, 0.5)))"],
)  # fmt: skip
def test_sound_recipes_hold(call):
    found = judged(recipes.parse(call), steps=24)
    for what in ("replicas differ by", "mass lost", "residual lost", "residual over gradient",
                 "contraction over bound"):  # fmt: skip
        assert found[what].held, (call, found[what])
    assert found["xi"].held is not False


@pytest.mark.parametrize("call", ["terngrad()", "qsgd(bits=2)"])
def test_what_is_rounded_to_nothing_is_not_left_out(call):
    """Zero is a level of theirs; they are judged as few bits, not as a selection of entries."""
    (notes, *_) = watched(recipes.parse(call))
    assert any(note.density < 0.8 for note in notes) and not any(note.sparse for note in notes)
    found = {v.what: v for v in verdicts(notes, 0.0)}
    assert found["top-k over rand-k"].held is None and found["xi"].held is None


def test_all_dimensions_leave_no_row_out_and_flat_selection_does():
    assert judged(recipes.adtopk(density=0.05))["rows missing"].value == 0.0
    assert judged(recipes.topk(density=0.01))["rows missing"].value > 0.0


def test_a_residual_that_is_dropped_is_caught():
    sound = recipes.topk(density=0.05)
    broken = _with_memory(sound, Forgetful())
    assert judged(sound)["residual lost"].held
    assert judged(broken)["residual lost"].held is False


@dataclass(frozen=True)
class Exaggerating(Residual):
    """Broken on purpose: more comes back than was left."""

    def keep(self, residual, sent, bucket):
        sent.add_into(residual, alpha=-1.0)
        residual.mul_(1.5)


def test_a_residual_that_grows_by_itself_is_caught():
    broken = _with_memory(recipes.topk(density=0.05), Exaggerating())
    assert judged(broken)["residual lost"].held is False


@pytest.mark.parametrize(
    ("call", "held"),
    [('topk(density=0.05, memory="none")', False), ('adtopk(density=0.05, memory="none")', False),
     ("topk(density=0.05, memory=Residual(decay=0.0))", False),
     ("topk(density=0.05, memory=Residual(decay=0.9))", False),
     ('powersgd(rank=1, memory="none")', False), ('signsgd(memory="none")', False),
     ('qsgd(memory="none")', True), ('natural(memory="none")', True), ("demo_dct(chunk=8)", True)],
)  # fmt: skip
def test_what_is_forgotten_is_lost_unless_it_is_rounded_fairly(call, held):
    """DeMo's decay, a thousandth a step, is within what is called rounding."""
    found = judged(recipes.parse(call), steps=40)["residual lost"]
    assert found.held is held, found


def test_a_mean_that_is_not_the_average_is_caught():
    @dataclass(frozen=True)
    class Wrong:
        inner: object

        def reduce(self, bucket, comm):
            reduced = self.inner.reduce(bucket, comm)
            return replace(reduced, mean=reduced.mean * 1.1)

    found = judged(Wrong(recipes.topk(density=0.05, memory="none")))
    assert found["mass lost"].held is False


def test_notes_of_one_rank_can_be_worked_out_by_hand():
    """One rank: C(mean x) is what was sent, so xi is 0; the rest follows from x."""
    notes = watched(recipes.topk(density=0.1), steps=1, world=1)[0]
    (note,) = notes
    draw = torch.Generator().manual_seed(0)
    x = -torch.randn(SHAPE, generator=draw)
    x = (x + 0.1 * torch.randn(SHAPE, generator=draw)).view(-1)
    kept = x.abs().topk(60).indices
    left = x.clone()
    left[kept] = 0
    assert note.xi == pytest.approx(0.0, abs=1e-6)
    assert note.contraction == pytest.approx(
        float(left.square().sum() / x.square().sum()), rel=1e-4
    )
    assert note.density == pytest.approx(0.1)
    assert note.residual == pytest.approx(float(left.norm() / x.norm()), rel=1e-4)
    assert note.limit == pytest.approx(2 * 0.9**0.5 / 0.1)
    touched = torch.zeros(600)
    touched[kept] = 1
    assert note.missing == pytest.approx(float((touched.view(SHAPE).sum(1) == 0).float().mean()))
    assert note.overlap == 1.0


def test_notes_of_three_ranks_can_be_worked_out_by_hand():
    """xi is asked in the parameter's own shape: the largest of every row, not of all."""
    note = watched(recipes.adtopk(density=0.1), steps=1)[0][0]
    every = []
    for rank in range(3):
        draw = torch.Generator().manual_seed(rank)
        x = -torch.randn(SHAPE, generator=draw)
        every.append(x + 0.1 * torch.randn(SHAPE, generator=draw))

    def largest(x):
        at = x.abs().topk(3, dim=1).indices
        return torch.zeros_like(x).scatter_(1, at, x.gather(1, at))

    mean = sum(every) / 3
    sent = sum(map(largest, every)) / 3
    xi = (largest(mean) - sent).norm() / mean.norm()
    assert note.xi == pytest.approx(float(xi), rel=1e-4)
    kept = int((sent != 0).sum())
    random = (1 - kept / 600) * mean.square().sum()
    assert note.delta == pytest.approx(float((mean - sent).square().sum() / random), rel=1e-4)
    assert note.overlap == pytest.approx((180 - kept) / (2 * kept)) and 0 < note.overlap < 1
    assert note.missing == 0.0


def test_a_step_that_overflows_is_not_taken_for_a_loss():
    """It is left out, as a loss scale has it; the next one looks back on nothing."""
    observer, state = Observer(every=2), {}
    recipe = observed(recipes.topk(density=0.05), observer)
    draw = torch.Generator().manual_seed(0)

    def work(comm):
        for step, first in ((0, 1.0), (1, float("inf")), (1, 1.0), (2, 1.0)):
            grad = torch.randn(SHAPE, generator=draw)
            grad[0, 0] = first
            recipe.reduce(Bucket.of({"w": grad}, state=state, step=step), comm)

    local.run(1, work)
    assert len(observer.notes) == 3
    (residual,) = (v for v in verdicts(observer.notes, 0.0, True) if v.what == "residual lost")
    assert residual.held is not False


def test_ranks_agree_on_what_is_common_to_them():
    every = watched(recipes.topk(density=0.05))
    for notes in every[1:]:
        for mine, theirs in zip(notes, every[0], strict=True):
            assert (mine.xi, mine.delta, mine.missing, mine.contraction) == (
                theirs.xi, theirs.delta, theirs.missing, theirs.contraction
            )  # fmt: skip


def test_a_recipe_that_is_made_anew_in_every_step_can_be_observed():
    """Other schedules than densities: the parts exist only while a step lasts."""
    ramp = recipes.parse("dgc(density=0.05, sample=Ramp(start=0.5, end=0.1, steps=5))")
    assert judged(ramp)["residual lost"].held


@pytest.mark.parametrize(
    "call", ["slots(density=0.05)", "acpsgd(rank=2)", "adtopk(density=0.1, interleave=True)"]
)
def test_observing_changes_nothing(call):
    recipe = recipes.parse(call)

    def work(comm, looked_at):
        draw, state, means = torch.Generator().manual_seed(comm.rank), {}, []
        for step in range(8):
            grad = {"w": torch.randn(SHAPE, generator=draw)}
            means.append(looked_at.reduce(Bucket.of(grad, state=state, step=step), comm).mean)
        return torch.stack(means)

    plain = local.run(3, lambda comm: work(comm, recipe))
    seen = local.run(3, lambda comm: work(comm, observed(recipe, Observer(every=2))))
    assert torch.equal(plain[0], seen[0])


def test_a_selection_of_the_smallest_is_caught():
    """Worse than random: the contraction bound and gTop-k's assumption fail."""
    wrong = Select(pick=_smallest, density=0.05)
    found = judged(Remember(wrong), steps=24)
    assert found["contraction over bound"].held is False
    assert found["top-k over rand-k"].held is False
    assert found["residual lost"].held  # which is not its fault


def test_a_compressor_that_adds_is_caught():
    """Nothing is left out, so the bound is that of sending nothing."""

    @dataclass(frozen=True)
    class Turned:
        inner: object

        def reduce(self, bucket, comm):
            bucket.flat = -bucket.take()
            return self.inner.reduce(bucket, comm)

    found = judged(Remember(Turned(dense())), steps=6)
    assert found["contraction over bound"].held is False


def test_one_bad_parameter_is_not_lost_among_good_ones():
    good = watched(recipes.topk(density=0.1))[0]
    bad = [replace(note, name="bad", contraction=note.bound + 0.02) for note in good]
    many = [replace(note, name=f"good{i}") for i in range(50) for note in good]
    found = {v.what: v for v in verdicts([*many, *bad], 0.0)}["contraction over bound"]
    assert found.held is False and found.where == "bad"


def test_a_xi_that_grows_is_caught():
    notes = watched(recipes.topk(density=0.1), steps=40)[0]
    steady = {v.what: v for v in verdicts(notes, 0.0)}["xi"]
    growing = [replace(note, xi=note.xi * (1 + note.step) ** 2) for note in notes]
    assert steady.held
    assert {v.what: v for v in verdicts(growing, 0.0)}["xi"].held is False


def test_a_residual_above_its_limit_is_caught():
    notes = watched(recipes.topk(density=0.1))[0]
    large = [*notes, replace(notes[0], name="late", residual=notes[0].limit * 1.1)]
    found = {v.what: v for v in verdicts(large, 0.0)}["residual over gradient"]
    assert found.held is False and found.where == "late"


def test_replicas_that_differ_are_caught(pool):
    for where, expected in ((None, 0.0), (1, 0.25)):
        assert pool.run(2, _divergence, where) == [expected] * 2
    assert verdicts([], 0.25)[0].held is False
    assert verdicts([], 0.0)[0].held


def _divergence(rank, world, where):
    net = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(1.0)
        if rank == where:
            net.weight[0, 1] += 0.25
    return divergence(net)


def _smallest(rows, k, state):
    """Broken on purpose."""
    found = rows.abs().topk(k, largest=False).indices
    return (found + torch.arange(len(rows))[:, None] * rows.shape[1]).view(-1)


def _with_memory(part, memory):
    if isinstance(part, Remember):
        return replace(part, memory=memory)
    changed = {
        name: _with_memory(value, memory)
        for name, value in vars(part).items()
        if hasattr(value, "reduce")
    }
    return replace(part, **changed)


def test_what_could_not_be_looked_at_is_not_judged():
    with pytest.raises(ValueError, match="never finite"):
        Study(recipes.topk(), every=2).proof("topk()")


@pytest.mark.parametrize(
    ("call", "promised"),
    [("adtopk()", True), ("adtopk(density=Ramp(start=0.3, end=0.01, steps=9))", True),
     ("adtopk(interleave=True)", False), ("topk()", False), ("gtopk()", False), ("int8()", False),
     ("demo_dct()", False)],
)  # fmt: skip
def test_rows_are_promised_by_who_selects_in_each(call, promised):
    assert leaves_no_row_out(recipes.parse(call)) is promised
