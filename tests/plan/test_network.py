"""Fits, data sheets and probes."""

from __future__ import annotations

import json
import time

import pytest

from thinwire.comm import local
from thinwire.comm.metered import Metered
from thinwire.plan import network
from thinwire.plan.network import (
    VERBS,
    Line,
    Network,
    fit,
    from_rate,
    load,
    messages,
    probe,
    save,
)


def test_a_line_is_found_again():
    points = [(6, 2.0**p, 6 * 1e-3 + 2.0**p * 8e-9) for p in range(10, 25)]
    line = fit(points)
    assert line.alpha == pytest.approx(1e-3) and line.beta == pytest.approx(8e-9)
    assert line.error < 1e-9


def test_noise_is_reported_and_nothing_is_negative():
    noisy = [(1, 2.0**p, (1e-4 + 2.0**p * 1e-8) * (1.2 if p % 2 else 0.8)) for p in range(10, 25)]
    line = fit(noisy)
    assert 0.1 < line.error < 0.3
    assert line.alpha == pytest.approx(1e-4, rel=0.3)
    shrinking = [(1, 2.0**p, 1e-3 * (1 - p / 100)) for p in range(10, 20)]
    assert fit(shrinking).beta == 0
    steep = [(1, 2.0**p, 2.0**p * 1e-8 * (1 + p / 50)) for p in range(10, 20)]
    assert fit(steep).alpha == 0


def test_a_line_that_is_held_at_zero_is_the_best_of_those():
    """The other number is fitted again: any change of it makes the relative errors larger."""

    def off(alpha, beta, points):
        return sum(((alpha * m + beta * b) / t - 1) ** 2 for m, b, t in points)

    steep = [(1, 2.0**p, 2.0**p * 1e-8 * (1 + p / 50)) for p in range(10, 20)]
    flat = [(1, 2.0**p, 1e-3 * (1 - p / 100)) for p in range(10, 20)]
    a, b = fit(flat).alpha, fit(steep).beta
    for change in (0.999, 1.001):
        assert off(0, b, steep) < off(0, b * change, steep)
        assert off(a, 0, flat) < off(a * change, 0, flat)


def test_a_data_sheet():
    links = from_rate("1gbit", "50us", 4)
    assert links.seconds("all_reduce", 1_000_000) == pytest.approx(6 * 50e-6 + 8e-3)
    assert links.seconds("exchange", 0) == pytest.approx(50e-6)
    assert links.at(8).seconds("all_gather", 0) == pytest.approx(7 * 50e-6)
    assert links.at_rate(1e10).seconds("exchange", 1e6) == pytest.approx(50e-6 + 0.8e-3)
    assert links.at(1).seconds("all_reduce", 1_000_000) == 0
    for rate, latency in (("0gbit", "1us"), ("1gbit", "-1us"), ("fast", "1us")):
        with pytest.raises(ValueError, match="got"):
            from_rate(rate, latency, 2)


def test_a_probe_is_the_same_on_all_ranks_and_survives_a_file(tmp_path):
    found = local.run(3, lambda comm: probe(comm, sizes=(1024, 4096, 65_536)))
    assert found[0] == found[1] == found[2]
    assert set(found[0].lines) == set(VERBS)
    assert all(len(line.points) == 3 for line in found[0].lines.values())
    path = tmp_path / "probe.json"
    save(found[0], path)
    again = load(path)
    assert again.lines == found[0].lines and again.world == 3 and again.source == "probe.json"


def test_a_probe_counts_the_bytes_of_one_call():
    lines = local.run(2, lambda comm: probe(comm, sizes=(1024, 4096)))[0].lines
    for verb, share in (("exchange", 1), ("all_reduce", 1), ("all_gather", 0.5)):
        assert [sent for sent, _ in lines[verb].points] == [1024 * share, 4096 * share], verb


def test_a_call_takes_as_long_as_on_the_slowest_rank():
    def worker(comm):
        wait = 0.05 if comm.rank == 1 else 0.0
        return network._timed(lambda _: time.sleep(wait), Metered(comm), comm, 2)

    first, *others = local.run(3, worker)
    assert first >= 0.05 and others == [first] * 2


def test_between_measured_points_the_way_is_straight():
    bent = Line(alpha=0.1, beta=1.0, points=((100, 1.0), (200, 5.0), (400, 6.0)))
    links = Network(world=2, lines=dict.fromkeys(VERBS, bent), source="made up")
    found = [links.seconds("exchange", sent) for sent in (100, 150, 200, 300, 400, 800)]
    assert found == pytest.approx([1.0, 3.0, 5.0, 5.5, 6.0, 8.0])
    assert links.seconds("exchange", 50) == pytest.approx(0.1 + 50), "below, by the line"


def test_a_slow_network_is_not_probed_for_ever():
    found = local.run(2, lambda comm: probe(comm, patience=0.0, sizes=(1024, 2048, 4096)))
    assert all(len(line.points) == 1 for line in found[0].lines.values())


def test_a_world_of_one_sends_nothing():
    links = local.run(1, probe)[0]
    assert links.seconds("all_reduce", 10**9) == 0
    assert messages("all_gather", 1) == 0


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "probe.json"
    with pytest.raises(ValueError, match="cannot read"):
        load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="cannot read"):
        load(path)
    for data in ({"format": "thinwire network 0"}, [1]):
        path.write_text(json.dumps(data))
        with pytest.raises(ValueError, match="measure again"):
            load(path)
    save(from_rate("1gbit", "1us", 2), path)
    whole = json.loads(path.read_text())
    for change in ({"lines": {}}, {"world": 0}, {"world": "x"}):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(ValueError, match="damaged"):
            load(path)
    whole["lines"]["exchange"]["beta"] = -1
    path.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="negative"):
        load(path)
    assert network.FORMAT.startswith("thinwire")
