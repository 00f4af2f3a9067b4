"""Value codes: their papers' bounds, odd numbers, and bytes that cannot be trusted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire import Bucket, kernels, recipes
from thinwire.comm import local
from thinwire.comm.metered import Metered
from thinwire.describe import parts
from thinwire.layout import vectors
from thinwire.payload import values_of
from thinwire.protocols import WireError
from thinwire.wire import Wire
from thinwire.wire.average import reduce_traffic
from thinwire.wire.blocks import Fp8, Int8, Levels, Natural, OneBit, Signs, cut
from thinwire.wire.link import Link
from thinwire.wire.packing import packed_bytes, unpacked
from thinwire.wire.values import Bf16, Exact, Half

CODECS = {
    "exact": Exact(),
    "half": Half(),
    "bf16": Bf16(),
    "int8": Int8(64),
    "fp8": Fp8(64),
    "signs": Signs(64),
    "onebit": OneBit(64),
    "qsgd": Levels(bits=4, block=64),
    "qsgd unbiased": Levels(bits=8, block=64, fitted=False),
    "ternary": Levels(bits=2, block=64, norm="max", clip=2.5),
    "natural": Natural(),
}


def draw(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def round_trip(codec, x, salt=""):
    data = codec.encode(x, salt)
    assert data.dtype == torch.uint8
    assert data.numel() == codec.nbytes(x.numel(), x.element_size())
    return codec.decode(data, x.numel(), x.dtype)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@given(st.data())
@settings(max_examples=30)
def test_packing_is_exact(bits, data):
    numbers = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=40))
    codes = torch.tensor(numbers, dtype=torch.uint8)
    assert kernels.pack(codes, bits).numel() == packed_bytes(len(numbers), bits)
    assert unpacked(kernels.pack(codes, bits), bits, len(numbers)).tolist() == numbers


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CODECS)
def test_any_length(name, n, dtype):
    x = draw(n).to(dtype)
    back = round_trip(CODECS[name], x)
    assert back.dtype == dtype and back.shape == x.shape
    assert float((x - back).norm()) <= 1.01 * float(x.norm()) or "unbiased" in name


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("x", [torch.zeros(100), torch.full((100,), 1e-42), torch.full((9,), 3e38)])
def test_extremes_stay_finite(name, x):
    back = round_trip(CODECS[name], x)
    assert back.isfinite().all()
    assert x.any() or not back.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", CODECS)
def test_nothing_broken_is_hidden(name, bad):
    x = draw(200)
    x[70] = bad
    assert not round_trip(CODECS[name], x).isfinite().all()


@pytest.mark.parametrize("name", CODECS)
def test_a_message_of_the_wrong_length_is_refused(name):
    codec, x = CODECS[name], draw(100)
    data = codec.encode(x)
    for wrong in (data[:-1], torch.cat([data, data[:3]]), data[:0]):
        with pytest.raises(WireError):
            codec.decode(wrong, 100, torch.float32)


def test_int8_rounds_to_the_nearest():
    x = draw(640)
    back = round_trip(Int8(64), x)
    step = x.view(-1, 64).abs().amax(dim=1, keepdim=True) / 127
    assert ((x - back).view(-1, 64).abs() <= 0.5001 * step).all()


def test_fp8_keeps_three_bits_of_mantissa():
    x = draw(640).abs() + 0.5
    assert ((x - round_trip(Fp8(64), x)).abs() <= x / 16 * 1.0001).all()


def test_the_sign_carries_the_mean_magnitude():
    x = draw(640)
    back = round_trip(Signs(64), x)
    mean = x.view(-1, 64).abs().mean(dim=1, keepdim=True)
    assert torch.allclose(back.view(-1, 64), x.view(-1, 64).sign() * mean)


def test_onebit_carries_two_means():
    x = draw(64) + 0.3
    back = round_trip(OneBit(64), x)
    assert torch.allclose(back[x >= 0], x[x >= 0].mean())
    assert torch.allclose(back[x < 0], x[x < 0].mean())
    assert float(back.sum()) == pytest.approx(float(x.sum()), abs=1e-4), "the sum is kept"


def many(codec, x, draws):
    data = [round_trip(codec, x, str(i)) for i in range(draws)]
    return torch.stack(data).double()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_is_unbiased_within_its_variance_bound(bits):
    """E Q(x) = x, and E |Q(x) - x|^2 <= min(d / s^2, sqrt(d) / s) |x|^2: QSGD, lemma 3.1."""
    d, draws = 256, 4000
    x = draw(d)
    codec = Levels(bits=bits, block=d, fitted=False)
    s = codec.levels
    trials = many(codec, x, draws)
    bound = min(d / s**2, math.sqrt(d) / s) * float(x.norm()) ** 2
    variance = float((trials - x).square().sum(dim=1).mean())
    assert variance <= bound
    assert float((trials.mean(dim=0) - x).norm()) <= 4 * math.sqrt(variance / draws)


def test_levels_of_the_largest_are_finer_than_levels_of_the_norm():
    """For d numbers the norm is some sqrt(d) / 3 times the largest, and so is a level."""
    x = draw(512)
    errors = [float((round_trip(Levels(norm=norm), x) - x).norm() / x.norm())
              for norm in ("max", "l2")]  # fmt: skip
    assert errors[0] < 0.25 < 0.7 < errors[1]


def test_terngrad_is_unbiased_and_ternary():
    x, draws = draw(256), 4000
    codec = Levels(bits=2, block=256, norm="max", fitted=False)
    trials = many(codec, x, draws)
    assert set(trials.abs().unique().tolist()) == {0.0, float(x.abs().max())}
    variance = float((trials - x).square().sum(dim=1).mean())
    assert float((trials.mean(dim=0) - x).norm()) <= 4 * math.sqrt(variance / draws)


def test_terngrad_clips_at_its_sigmas():
    x = torch.cat([torch.ones(511), torch.tensor([1000.0])])
    sigma = float(x.square().mean().sqrt())
    codec = Levels(bits=2, block=512, norm="max", clip=2.5, fitted=False)
    assert float(round_trip(codec, x).max()) == pytest.approx(2.5 * sigma, rel=1e-5)


def test_natural_compression_is_unbiased_with_an_eighth_of_variance():
    """E |C(x) - x|^2 <= |x|^2 / 8: Horvath et al., theorem 1; every value a power of two."""
    x, draws = draw(256), 4000
    trials = many(Natural(), x, draws)
    assert torch.equal(trials[0].abs().log2(), trials[0].abs().log2().round())
    variance = (trials - x).square().mean(dim=0)
    assert float(variance.sum()) <= float(x.square().sum()) / 8
    assert float((trials.mean(dim=0) - x).norm()) <= 4 * math.sqrt(float(variance.sum()) / draws)


@settings(max_examples=100)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=200), st.sampled_from([2, 4]))
def test_a_fitted_scale_never_makes_the_error_exceed_the_numbers(numbers, bits):
    """|x - c q|^2 = |x|^2 - <x, q>^2 / |q|^2: what error feedback needs."""
    x = torch.tensor(numbers, dtype=torch.float64)
    back = round_trip(Levels(bits=bits, block=32), x)
    assert float((x - back).norm()) <= float(x.norm()) * (1 + 1e-6) + 1e-30


def test_random_rounding_is_private_and_repeatable():
    x, codec = draw(100), Levels(bits=2, block=100)
    before = torch.get_rng_state()
    a, b, c = (codec.encode(x, salt) for salt in ("1/0", "1/0", "1/1"))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert not torch.equal(a, Levels(bits=2, block=100, seed=1).encode(x, "1/0"))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Int8(0), "block must be a whole number of at least 1, got 0"),
    (lambda: Levels(bits=3), "bits must be 2, 4 or 8, got 3"),
    (lambda: Levels(norm="l1"), "norm must be 'l2' or 'max'"),
    (lambda: Levels(clip=0.0), "clip must be above 0"),
    (lambda: recipes.qsgd(bits=16), "bits must be 2, 4 or 8, got 16"),
])  # fmt: skip
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize(
    "name", ["int8", "fp8", "natural", "qsgd", "terngrad", "signsgd", "onebit"]
)
def test_error_feedback_does_not_run_away(name, world):
    """A steady gradient and noise: after 60 steps the residual is still a few gradients long."""
    recipe, states = getattr(recipes, name)(), [{} for _ in range(world)]
    steady = draw(1024, 99)

    def worker(comm):
        total = torch.zeros(1024)
        for step in range(60):
            grads = {"w": steady + draw(1024, 1000 * step + comm.rank)}
            bucket = Bucket.of(grads, state=states[comm.rank], step=step)
            total += recipe.reduce(bucket, comm).mean
        residual = states[comm.rank]["slots"]["w"]["memory"]["residual"]
        return float(residual.norm()) / float(grads["w"].norm()), total / 60

    results = local.run(world, worker)
    assert max(length for length, _ in results) < 12
    drift = float((results[0][1] - steady).norm()) / float(steady.norm())
    assert drift < 0.6, "on average the steady part arrives"


def test_what_stays_with_its_owner_is_rounded_once():
    """The mean is the code of the exact mean of the owner's numbers and of what others sent."""
    codec, xs = Signs(64), [draw(1024, rank) for rank in range(4)]
    results = local.run(4, lambda comm: Link(comm, Wire(values=codec)).all_reduce(xs[comm.rank]))
    shares = torch.stack([values_of(share, mean) for mean, share in results])
    for rank, (mean, _) in enumerate(results):
        own = slice(256 * rank, 256 * (rank + 1))
        sent = shares.sum(dim=0) - shares[rank]
        assert torch.allclose(mean[own], round_trip(codec, (xs[rank] + sent)[own] / 4), atol=1e-5)


@pytest.mark.parametrize("name", ["int8", "fp8", "signs", "onebit"])
def test_stretches_coded_together_are_coded_as_if_alone(name):
    x, sizes = draw(300), [100, 1, 64, 135]
    x[100:165] /= 1000
    together = round_trip(cut(CODECS[name], (100, 101, 165, 300)), x)
    alone = torch.cat([round_trip(CODECS[name], part) for part in x.split(sizes)])
    assert torch.equal(together, alone)
    assert not torch.equal(together, round_trip(CODECS[name], x))


def layers(rank):
    """Weights, and norms whose gradients are a hundredth of theirs."""
    grads = {}
    for layer in range(8):
        grads[f"{layer}.weight"] = draw(32 * 288, 100 * rank + layer).view(32, 288)
        grads[f"{layer}.norm"] = draw(32, 100 * rank + layer + 50) / 100
        grads[f"{layer}.bias"] = draw(32, 100 * rank + layer + 70) / 100
    return grads


@pytest.mark.parametrize(
    ("name", "most"),
    [("int8", 0.02), ("fp8", 0.035), ("qsgd", 0.3), ("terngrad", 1.6), ("signsgd", 0.85),
     ("onebit", 0.85)],
)  # fmt: skip
def test_norms_are_as_good_as_weights(name, most):
    """Blocks that straddle parameters would give norms the scale of weights: errors of 0.04 (fp8)
    to 60 (signs) times the norms' gradients."""
    recipe, each = getattr(recipes, name)(memory="none"), [layers(rank) for rank in range(4)]

    def worker(comm):
        bucket = Bucket.of(each[comm.rank], state={})
        mean = recipe.reduce(bucket, comm).mean
        return {slot.name: slot.view(mean).clone() for slot in bucket.layout.slots}

    for mean in local.run(4, worker):
        for kind in ("weight", "norm", "bias"):
            found = torch.cat([mean[f"{layer}.{kind}"].view(-1) for layer in range(8)])
            true = sum(
                torch.cat([grads[f"{layer}.{kind}"].view(-1) for layer in range(8)])
                for grads in each
            ) / 4  # fmt: skip
            assert float((found - true).norm() / true.norm()) < most, kind


@pytest.mark.parametrize(
    "name", ["int8", "fp8", "natural", "qsgd", "terngrad", "signsgd", "onebit"]
)
@pytest.mark.parametrize("dense", [vectors, ["norm", "bias"]])
def test_parameters_named_dense_are_averaged_exactly(name, dense):
    recipe, each = getattr(recipes, name)(dense=dense), [layers(rank) for rank in range(3)]

    def worker(comm):
        meter, bucket = Metered(comm), Bucket.of(each[comm.rank], state={})
        reduced = recipe.reduce(bucket, meter)
        sent = reduced.sent.add_into(torch.zeros_like(bucket.flat))
        return {s.name: s.view(reduced.mean).clone() for s in bucket.layout.slots}, sent, (
            meter.traffic == recipe.traffic(bucket.layout, comm.size), reduced.mean
        )  # fmt: skip

    results = local.run(3, worker)
    for mean, _, (as_priced, flat) in results:
        assert as_priced
        assert torch.allclose(flat, sum(sent for _, sent, _ in results) / 3, atol=1e-5)
        for layer in range(8):
            for kind in ("norm", "bias"):
                true = sum(grads[f"{layer}.{kind}"].double() for grads in each) / 3
                assert torch.allclose(mean[f"{layer}.{kind}"].double(), true, atol=1e-8)
        assert not torch.allclose(mean["0.weight"], sum(g["0.weight"] for g in each) / 3, atol=1e-5)


@pytest.mark.parametrize("name", ["int8", "onebit", "qsgd"])
@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("sizes", [[5], [1, 1], [300, 7, 1, 0, 600, 33], [2, 5000, 5]])
def test_metered_is_priced_and_the_law_holds_whatever_the_cut(name, world, sizes):
    """Chunks of the all-to-all cut blocks too, and all are as long as the longest."""
    codec = {"int8": Int8(64), "onebit": OneBit(64), "qsgd": Levels(block=64)}[name]
    xs = [draw(sum(sizes), rank) for rank in range(world)]

    def worker(comm):
        meter = Metered(comm)
        mean, share = Link(meter, Wire(values=codec)).all_reduce(xs[comm.rank], sizes)
        return mean, share, meter.traffic

    results = local.run(world, worker)
    average = sum(values_of(share, mean) for mean, share, _ in results) / world
    for mean, _, metered in results:
        assert torch.equal(mean, results[0][0]) and torch.allclose(mean, average, atol=1e-5)
        assert metered == reduce_traffic(sum(sizes), world, Wire(values=codec), sizes=sizes)


def test_an_average_has_no_padding_in_it():
    """Of 5 numbers on 4 ranks the chunks have 2, 2, 1 and none: one bit of the last 1 is its own
    magnitude, not that of the number and of what fills the chunk up."""
    xs = [torch.tensor([1.0, 1.0, 1.0, 1.0, 8.0])] * 4
    results = local.run(4, lambda comm: Link(comm, Wire(values=Signs(64))).all_reduce(xs[0]))
    for mean, share in results:
        assert mean.tolist() == values_of(share, mean).tolist() == [1.0, 1.0, 1.0, 1.0, 8.0]


def test_one_bit_a_value_is_one_bit_on_the_wire():
    dense = recipes.dense().traffic(layout_of(100_000), 4).bytes
    for name, least in (("signsgd", 29), ("onebit", 26), ("terngrad", 15), ("qsgd", 7.8),
                        ("int8", 3.9), ("fp8", 3.9), ("natural", 3.99)):  # fmt: skip
        assert dense / getattr(recipes, name)().traffic(layout_of(100_000), 4).bytes > least


def layout_of(n):
    return Bucket.of({"w": torch.zeros(n)}, state={}).layout


def test_int4_rounds_to_the_nearest_level():
    """Of a block whose scale is known: no error is above half a level, whatever the salt."""
    x = torch.linspace(-7, 7, 192)
    levels = Levels(bits=4, block=192, norm="max", fitted=False, nearest=True)
    first, second = (levels.encode(x, salt) for salt in ("a", "b"))
    assert torch.equal(first, second)
    assert (levels.decode(first, 192, torch.float32) - x).abs().max() <= 0.5 + 1e-5
    (codec,) = (p for p in parts(recipes.int4()) if isinstance(p, Levels))
    assert codec.nearest and codec.fitted and (codec.bits, codec.block) == (4, 192)
