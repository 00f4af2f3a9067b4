"""The loop: resumes to the bit, saves whole or not at all, stops together, scores on all ranks."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import re
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.processes import once
from thinwire_lab import files
from thinwire_lab.errors import Refused
from thinwire_lab.jobs.catalogue import find
from thinwire_lab.jobs.data.source import MissingData, Shards
from thinwire_lab.jobs.job import Source
from thinwire_lab.runs import checkpoint, config, logs, loop, prefetch, runner
from thinwire_lab.runs.launch import Worker

RUNS = (
    ("topk(density=0.05)", {}),
    ("dgc(density=0.05)", {}),
    ("acpsgd(rank=2)", {}),
    ("slots(density=0.05)", {}),
    ("ddp", {"loaders": 1}),
    # batch norm, mixed precision, a loss scale, clipping
    ("topk(density=0.05)", {"job": "resnet20", "precision": "fp16", "clip": 1.0}),
    # dropout, Adam, several batches a step
    ("topk(density=0.05)", {"job": "gpt2", "accumulate": 2}),
    ("adtopk(density=Ramp(start=0.5, end=0.05, steps=9), interleave=True)", {"job": "gpt2"}),
    # a rate that hangs on scores; checkpoints of before a score and of after it
    ("dense()", {"schedule": "plateau", "score_every": 0.02, "patience": 0, "save_every": 0.02}),
    ("dense()", {"schedule": "plateau", "score_every": 0.02, "patience": 0}),
)


def made(recipe: str, job: str = "mlp", **settings):
    return config.make_run({"job": job, "size": "tiny", "recipe": recipe,
                        "settings": {"steps": 12, "save_every": 0, **settings}})  # fmt: skip


def weights(net):
    """And running means."""
    return torch.cat([t.detach().double().reshape(-1) for t in net.state_dict().values()])


def straight_and_resumed(rank, world, recipe, options, folder):
    """The weights of a run in one go, and of one that was stopped after step 7."""
    place, found = Worker(rank=rank, world=world), []
    out = Path(folder)
    whole = made(recipe, **options)
    loop.train(place, whole, after=lambda net: found.append(weights(net)))
    count = [0]

    def enough() -> bool:
        count[0] += 1
        return count[0] >= 6

    half = loop.train(place, whole, out=out, asked_to_stop=enough)
    done = loop.train(
        place, whole, out=out, resume=True, after=lambda net: found.append(weights(net))
    )
    return found, half.steps, half.finished, done.steps, done.metrics, checkpoint.list_steps(out)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "options"), RUNS)
def test_a_resumed_run_ends_with_the_same_weights(recipe, options, pool, tmp_path):
    if options.get("job") == "gpt2":
        pytest.importorskip("transformers")
    for found, half, finished, steps, metrics, kept in pool.run(
        2, straight_and_resumed, recipe, options, str(tmp_path)
    ):
        asked = 6 if "score_every" in options else 7  # a score looks at once
        assert not finished and half == asked and steps == 12 and len(kept) == 2 and kept[1] == 12
        assert torch.equal(found[0], found[1])
        assert metrics["steps"] == 12


def hooked(rank, world, folder):
    """PyTorch's own, for 6 steps; its PowerSGD once more after a stop, of which nothing is kept."""
    place, found = Worker(rank=rank, world=world), {}
    for name in config.BASELINES:
        found[name] = loop.train(place, replace(made(name, steps=6), workers=world))
    run, stop = made("powersgd-hook", steps=6), iter([False, False] + [True] * 9)
    half = loop.train(place, run, out=Path(folder), asked_to_stop=lambda: next(stop))
    begun = runner._run_all(
        place, [(run, Path(folder))], lambda _: None, lambda: False, "none", None
    )
    return found, half, begun[0]


@pytest.mark.slow
def test_what_pytorch_has_is_counted_from_its_first_step(pool, tmp_path):
    (found, half, again), _ = pool.run(2, hooked, str(tmp_path))
    sent = {name: outcome.metrics["bytes_sent"] for name, outcome in found.items()}
    dense = found["ddp"].metrics["bytes_dense"]
    assert sent["ddp"] == dense and sent["fp16-hook"] == dense / 2
    shapes = [p.shape for p in find("mlp").make("tiny", Source()).net().parameters()]
    each = sum(4 * sum(s) if len(s) == 2 and 8 * sum(s) < s[0] * s[1] else math.prod(s)
               for s in shapes)  # fmt: skip
    assert sent["powersgd-hook"] == 2 * dense // 6 + 4 * 4 * each  # two plain steps, four of rank 4
    assert found["powersgd-hook"].metrics["density"] == pytest.approx(sent["powersgd-hook"] / dense)
    assert all(outcome.loss < outcome.first_loss for outcome in found.values())
    assert 0 < half.steps < 6 and again.metrics["steps"] == 6
    assert again.loss == found["powersgd-hook"].loss  # as if it had never been begun


def accumulated(rank, world):
    """Two batches of 4 a step are one of 8."""
    found = []
    for batch, parts in ((8, 1), (4, 2)):
        run = made("dense()", batch=batch, accumulate=parts, steps=1)
        outcome = loop.train(
            Worker(rank=rank, world=world), run, after=lambda net: found.append(net)
        )
        assert outcome.steps == 1
    return [weights(net) for net in found]


def refused(rank, world, folder, break_it):
    """What a rank is told, how long it waited, and the steps that were saved."""
    place, out, begin = Worker(rank=rank, world=world), Path(folder), time.monotonic()
    run, tell = made("topk(density=0.05)", steps=30), lambda record: None
    if break_it == "torn file":
        loop.train(place, replace(run, settings=replace(run.settings, steps=2)), out=out)
        if rank == 1:
            (out / "checkpoints" / "step-00000002" / "rank-1.pt").write_bytes(b"torn")
        begin = time.monotonic()
    elif break_it == "data":
        prefetch.batches = _failing(prefetch.batches, 7 if rank == 1 else 1000)
    elif break_it == "test data":
        loop.batches = _failing(loop.batches, 1 if rank == 1 else 1000, of=list)
    elif rank == 0:
        tell = _full_at(5)
    try:
        loop.train(place, run, out=out, resume=break_it == "torn file", report=tell)
    except Refused as error:
        return str(error), time.monotonic() - begin, checkpoint.list_steps(out)
    return "nothing"


def _failing(batches, number, of=Shards):
    """Batches of which this one cannot be read, where picks are of this kind."""

    def cut(data, picks, loaders=0):
        for count, batch in enumerate(batches(data, picks, loaders), 1):
            if count == number and isinstance(picks, of):
                raise MissingData("picture 7 is torn")
            yield batch

    return cut


def _full_at(step):
    def tell(record):
        if record["step"] >= step:
            raise Refused("cannot write log.jsonl: No space left")

    return tell


@pytest.mark.slow
@pytest.mark.parametrize(
    ("break_it", "message", "steps"),
    [("torn file", r"^worker 1: .*rank-1.pt cannot be read", [2]),
     ("data", "^worker 1: picture 7 is torn$", [6]),
     ("test data", "^worker 1: picture 7 is torn$", [30]),
     ("disk", "^cannot write log.jsonl: No space left$", [8])],
)  # fmt: skip
def test_what_one_rank_is_refused_ends_all_with_its_words(break_it, message, steps, tmp_path):
    found = once(2, refused, str(tmp_path), break_it)
    assert found[0][0] == found[1][0]
    for words, seconds, kept in found:
        assert re.search(message, words) and seconds < 20 and kept == steps


def scored(rank, world):
    training = loop.Training(made("dense()"), Worker(rank=rank, world=world), _task())
    return training.score()


def cut_short(rank, world, folder, ended_in):
    """Ended in the score of step 8, or after it; then resumed. The scores that the log has."""
    place, out = Worker(rank=rank, world=world), Path(folder)
    every = 4 / loop.count_steps(_task(), made("dense()").settings, world)[0]
    run = made("dense()", score_every=every, save_every=every)
    whole = loop.Training.score

    def score(training):
        if training.step == 8 and ended_in == "score":
            raise RuntimeError("killed")
        return whole(training)

    steps = iter(range(1, 13))

    def asked():
        if next(steps) == 10:
            raise RuntimeError("killed")
        return False

    loop.Training.score = score
    try:
        runner._run_all(place, [(run, out)], lambda _: None, asked, "none", None)
    except RuntimeError:
        before = checkpoint.list_steps(out)
    finally:
        loop.Training.score = whole
    runner._run_all(place, [(run, out)], lambda _: None, lambda: False, "none", None)
    return before, [r["step"] for r in logs.read_records(out / logs.LOG) if "test_loss" in r]


@pytest.mark.slow
@pytest.mark.parametrize("ended_in", ["score", "step"])
def test_a_run_that_ended_in_a_score_has_it_once_it_is_resumed(ended_in, pool, tmp_path):
    assert pool.run(1, cut_short, str(tmp_path), ended_in) == [([4, 8], [4, 8, 12])]


def without_cells(rank, world):
    run = made("dense()", "lstm-wiki", precision="fp16")
    try:
        loop.train(Worker(rank=rank, world=world), run)
    except Refused as error:
        return str(error)


def test_what_pytorch_cannot_compute_here_is_one_line(pool):
    message = "PyTorch has no fp16 LSTM on a CPU; give --set precision=bf16"
    assert pool.run(1, without_cells) == [message]


def _task():
    return find("mlp").make("tiny", Source())


@pytest.mark.slow
def test_ranks_score_together_what_one_scores_alone(pool):
    (alone,) = pool.run(1, scored)
    for together in pool.run(3, scored):
        assert together == pytest.approx(alone, rel=1e-6)


@pytest.mark.slow
def test_mixed_precision_learns(monkeypatch):
    # some machines name instructions for 16 bits that they do not have
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    for outcomes in once(2, precise):
        for outcome in outcomes:
            assert outcome.loss < 0.9 * outcome.first_loss


def precise(rank, world):
    place, more = Worker(rank=rank, world=world), {"clip": 1.0, "steps": 40}
    runs = [made("topk(density=0.1)", precision=p, **more) for p in ("bf16", "fp16")]
    return [loop.train(place, run) for run in runs]


@pytest.mark.slow
def test_accumulation_takes_as_many_batches(pool):
    for first, second in pool.run(2, accumulated):
        assert torch.allclose(first, second, atol=1e-6)


def listens(rank, world, folder):
    """What a plateau has heard, and the figures of the test and of the validation text."""
    run = made("dense()", "lstm-wiki", schedule="plateau", score_every=1.0)
    run = replace(run, data=folder)
    try:
        task = prefetch.load_task(run)
    except Refused as error:
        return str(error)
    training = loop.Training(run, Worker(rank=rank, world=world), task)
    training.step = 1
    test, valid = training.score(), training._score_on(training.task.valid)
    return training.plateau.best, test["perplexity"], valid["perplexity"]


def test_a_plateau_listens_to_the_validation_text_not_to_the_test(pool, tmp_path):
    for part, words in (("train", "a b c d "), ("valid", "a b c d e "), ("test", "d c b a ")):
        (tmp_path / f"{part}.txt").write_text(words * 200)
    for heard, test, valid in pool.run(2, listens, str(tmp_path)):
        assert heard == valid != test
    (tmp_path / "valid.txt").write_text("a")
    for said in pool.run(2, listens, str(tmp_path)):
        assert said == "the validation data is shorter than one example; give more of it"


def test_checkpoints_that_cannot_be_used_say_why(tmp_path):
    with pytest.raises(Refused, match="has no checkpoint to resume from"):
        checkpoint.check_world(tmp_path, 2)
    folder = tmp_path / "checkpoints" / "step-00000003"
    folder.mkdir(parents=True)
    torch.save({}, folder / "rank-0.pt")
    with pytest.raises(Refused, match="was saved by 1 workers, now there are 2"):
        checkpoint.check_world(tmp_path, 2)
    (folder / "shared.pt").write_bytes(b"torn")
    with pytest.raises(Refused, match=r"shared\.pt cannot be read"):
        checkpoint.load(tmp_path, 0, 3)


def saved_twice(rank, world, folder):
    """What is there after three steps were saved; and that NaN does not replace it."""
    out = Path(folder)
    for step in (3, 4, 5):
        shared = {"step": step, "model": {"w": torch.full((4000,), float(step))}}
        checkpoint.save(out, step, rank, shared, {"sync": {"rank": rank, "step": step}})
    bad = {"step": 6, "model": {"w": torch.tensor([1.0, float("nan")])}}
    checkpoint.save(out, 6, rank, bad if rank == 1 else shared, {})
    checkpoint.save(out, 7, rank, shared, {"sync": [torch.tensor(float("inf"))] if rank else []})
    return checkpoint.list_steps(out)


def gone_on(rank, world, folder, damage):
    """The step from which a rank goes on after some files were damaged, or what it is told."""
    out, told = Path(folder), []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("thinwire_lab").addHandler(handler)
    if rank == 0:
        for name in damage:
            damaged(out / "checkpoints" / name)
    dist.barrier()
    try:
        shared, own = checkpoint.resume(out, rank, world)
        assert own["sync"] == {"rank": rank, "step": shared["step"]}
        assert shared["model"]["w"].eq(shared["step"]).all()
        return shared["step"], told, checkpoint.list_steps(out)
    except Refused as error:
        return str(error), told, checkpoint.list_steps(out)
    finally:
        logging.getLogger("thinwire_lab").removeHandler(handler)


def damaged(path):
    if path.suffix == ".sha256":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40  # an exponent's bit, if it is a weight's
    path.write_bytes(data)


LAST, BEFORE = "step-00000005", "step-00000004"


@pytest.mark.slow
def test_what_is_damaged_is_named_and_all_go_on_from_the_step_before(pool, tmp_path):
    assert pool.run(2, saved_twice, str(tmp_path / "whole")) == [[4, 5], [4, 5]]
    for number, names in enumerate(
        ([], [f"{LAST}/rank-1.pt"], [f"{LAST}/shared.pt"], [f"{LAST}/rank-0.pt.sha256"])
    ):
        out = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", out)
        (step, told, kept), (other, silent, _) = pool.run(2, gone_on, str(out), names)
        assert step == other == (4 if names else 5)
        assert kept == ([4] if names else [4, 5]) and silent == []
        if names:
            where = names[0].removesuffix(".sha256")
            assert len(told) == 1 and "\n" not in told[0]
            assert re.search(rf"{re.escape(where)} cannot be read .*; going on from step 4$", *told)
            assert (out / "checkpoints" / f"damaged-{LAST}").is_dir()


@pytest.mark.slow
def test_two_damaged_checkpoints_are_refused_by_all_with_the_name(pool, tmp_path):
    pool.run(2, saved_twice, str(tmp_path))
    names = [f"{LAST}/rank-1.pt", f"{BEFORE}/shared.pt"]
    zero, one = pool.run(2, gone_on, str(tmp_path), names)
    assert zero == one
    assert re.match(r"worker 1: .*step-00000005/rank-1\.pt cannot be read \(it is damaged", zero[0])
    assert zero[1:] == ([], [4, 5])


def test_no_flipped_bit_and_no_lost_page_of_a_checkpoint_goes_unnoticed(tmp_path):
    folder = tmp_path / "checkpoints" / LAST
    folder.mkdir(parents=True)
    checkpoint._write(folder, 0, {"model": {"w": torch.randn(3000)}}, {"tally": [1.0, 2]})
    for name in ("shared.pt", "rank-0.pt"):
        path, draw = folder / name, random.Random(0)
        whole, told = path.read_bytes(), (folder / f"{name}.sha256").read_text()
        assert told == f"{hashlib.sha256(whole).hexdigest()}  {name}\n", "sha256sum -c reads it"
        for turn in range(200):
            data, place = bytearray(whole), draw.randrange(len(whole))
            if turn % 10:
                data[place] ^= 1 << draw.randrange(8)
            else:
                data[place : place + 4096] = b"\xff" * len(data[place : place + 4096])
            path.write_bytes(data)
            with pytest.raises(Refused, match=f"{LAST}/{name} cannot be read"):
                checkpoint.load(tmp_path, 0, 5)
        path.write_bytes(whole)
        checkpoint.load(tmp_path, 0, 5)


def flipped(rank, world, folder):
    """12 steps at a stretch, and 12 resumed after one bit of the last checkpoint was flipped."""
    place, found, out = Worker(rank=rank, world=world), [], Path(folder)
    run = made("topk(density=0.05)", steps=12, save_every=0.01, schedule="constant")
    loop.train(place, run, after=lambda net: found.append(weights(net)))
    short = replace(run, settings=replace(run.settings, steps=7))
    loop.train(place, replace(short, workers=world), out=out)
    before = checkpoint.list_steps(out)
    if rank == 0:
        damaged(out / "checkpoints" / f"step-{before[-1]:08d}" / "shared.pt")
    dist.barrier()
    done = loop.train(
        place, run, out=out, resume=True, after=lambda net: found.append(weights(net))
    )
    return found, before, done.steps


@pytest.mark.slow
def test_a_run_whose_last_checkpoint_is_damaged_ends_with_the_same_weights(pool, tmp_path):
    for found, before, steps in pool.run(2, flipped, str(tmp_path)):
        assert before == [6, 7] and steps == 12
        assert torch.equal(found[0], found[1])


def diverged(rank, world, folder):
    """A run whose weights are not finite any more from the 4th step on."""
    place, out = Worker(rank=rank, world=world), Path(folder)
    take = loop.Training.take_step

    def breaks(training, part):
        loss = take(training, part)
        if training.step == 4:
            next(training.net.parameters()).data[0] = math.nan
        return loss

    loop.Training.take_step = breaks
    try:
        loop.train(place, made("dense()", steps=6, save_every=0.01), out=out)
    finally:
        loop.Training.take_step = take
    return checkpoint.list_steps(out)


@pytest.mark.slow
def test_a_state_that_is_not_finite_replaces_no_good_one(pool, tmp_path):
    assert pool.run(2, diverged, str(tmp_path)) == [[2, 3], [2, 3]]


def test_a_checkpoint_cannot_run_anything(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "was here",))

    folder = tmp_path / "checkpoints" / "step-00000003"
    folder.mkdir(parents=True)
    for name in ("shared.pt", "rank-0.pt"):
        torch.save({"step": Evil()}, folder / name)
        told = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        (folder / f"{name}.sha256").write_text(f"{told}  {name}\n")  # whoever made it can sum too
    with pytest.raises(Refused, match=r"cannot be read \(Weights only load failed"):
        checkpoint.load(tmp_path, 0, 3)
    assert not (tmp_path / "was here").exists()


def test_a_log_goes_on_where_the_checkpoint_is_and_forgets_a_torn_line(tmp_path):
    log = logs.Log(tmp_path, 0)
    for step in range(1, 6):
        log.add({"step": step, "loss": 1.0 / step})
    log.close()
    with (tmp_path / logs.LOG).open("a") as file:
        file.write('{"step": 6, "lo')
    assert [r["step"] for r in logs.read_records(tmp_path / logs.LOG)] == [1, 2, 3, 4, 5]
    log = logs.Log(tmp_path, 3)
    log.add({"step": 4, "loss": 0.1})
    log.close()
    assert [r["step"] for r in logs.read_records(tmp_path / logs.LOG)] == [1, 2, 3, 4]


def test_tensorboard_reads_the_curves(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = logs.Log(tmp_path, 0)
    for step in (1, 2):
        log.add({"step": step, "loss": float(step)})
    log.close()
    events = reading.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0)]


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    log = logs.Log(tmp_path, 0)
    log._file.close()
    log._file = full.open("wb", buffering=0)
    with pytest.raises(Refused, match=r"cannot write .*log\.jsonl: No space left"):
        log.add({"step": 1})
    if log._board is not None:
        log = logs.Log(tmp_path, 0)
        log._board._records._writer = SimpleNamespace(
            write=partial(files.append, full.open("wb", buffering=0))
        )
        with pytest.raises(Refused, match=r"cannot write beside .*log\.jsonl: No space left"):
            log.add({"step": 1, "loss": 1.0})


def test_a_place_to_write_is_looked_at_and_left_as_it_was(tmp_path):
    logs.check_writable(tmp_path / "a" / "b")
    logs.check_writable(tmp_path)
    assert tmp_path.is_dir() and not list(tmp_path.iterdir())


def test_a_run_is_not_overwritten_by_accident(tmp_path):
    run = made("dense()")
    runner.check_folder(run, tmp_path, resume=False)
    assert not list(tmp_path.iterdir())  # nothing is there before there is something to say
    (tmp_path / logs.LOG).write_text("{}\n")
    (tmp_path / logs.CONFIG).write_text(config.to_toml(run))
    with pytest.raises(Refused, match="holds a run already; give --resume"):
        runner.check_folder(run, tmp_path, resume=False)
    runner.check_folder(run, tmp_path, resume=True)
    other = replace(run, size="small", settings=replace(run.settings, rate=0.3))
    with pytest.raises(Refused, match=r"holds a run with other settings \(rate, size\)"):
        runner.check_folder(other, tmp_path, resume=True)


@pytest.mark.parametrize("name", ["config.toml", "checkpoints/step-500/model.pt", "tensorboard/a"])
def test_what_somebody_else_has_written_is_not_replaced(name, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(Refused, match=f"holds {name.partition('/')[0]}, which a run would replace"):
        runner.check_folder(made("dense()"), tmp_path, resume=False)


def checkpointed(rank, world, folder):
    for step in (5, 6):
        checkpoint.save(Path(folder), step, rank, {}, {})


def test_only_checkpoints_of_ours_are_removed(pool, tmp_path):
    (tmp_path / "checkpoints" / "step-500").mkdir(parents=True)
    pool.run(1, checkpointed, str(tmp_path))
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-00000005", "step-00000006", "step-500"]


def test_files_are_written_all_or_none(tmp_path):
    (tmp_path / "b").mkdir()  # a folder is in the way of the second
    (tmp_path / ".b.part").mkdir()
    with pytest.raises(Refused, match=r"cannot write .*b: Is a directory"):
        files.write_all(tmp_path, {"a": "1", "b": "2"})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b.part", "b"]


def test_what_a_run_writes_is_not_put_among_its_data(tmp_path):
    run = replace(made("dense()"), data=str(tmp_path / "text"))
    runner.check_folder(run, tmp_path / "texts", resume=False)
    begun = replace(run, data=None, checkpoint=run.data)
    for reader in (run, begun):
        for inside in ("text", "text/runs/a", "other/../text/b"):
            with pytest.raises(Refused, match=r"is inside .*text, whose files are read"):
                runner.check_folder(reader, tmp_path / inside, resume=False)
    (tmp_path / "text" / "old").mkdir(parents=True)  # one that is there already goes on
    (tmp_path / "text" / "old" / logs.LOG).write_text("{}\n")
    (tmp_path / "text" / "old" / logs.CONFIG).write_text(config.to_toml(run))
    runner.check_folder(run, tmp_path / "text" / "old", resume=True)


def test_a_damaged_result_says_so(tmp_path):
    (tmp_path / logs.RESULT).write_text(json.dumps({"recipe": "x"}))
    with pytest.raises(Refused, match="is damaged"):
        runner.read_result(tmp_path)
    assert runner.read_result(tmp_path / "elsewhere") is None


def test_numbers_that_are_none_are_valid_json_and_come_back(tmp_path):
    log = logs.Log(tmp_path, 0)
    log.add({"step": 1, "loss": float("nan")})
    log.add({"step": 2, "loss": float("inf")})
    log.close()
    for line in (tmp_path / logs.LOG).read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [math.isnan(r["loss"]) for r in logs.read_records(tmp_path / logs.LOG)] == [True, True]


def test_a_folder_has_one_training_at_a_time(tmp_path):
    out = tmp_path / "some" / "run"
    with logs.claim(out):
        with pytest.raises(Refused, match="another training writes in"), logs.claim(out):
            pass
        assert out.is_dir()
    assert not list(tmp_path.iterdir())  # nothing was written
    with logs.claim(out):
        (out / logs.LOG).write_text("{}")
    with logs.claim(out):
        assert (out / logs.LOG).exists()


def test_of_what_a_nearly_full_disk_takes_nothing_stays(tmp_path):
    class Nearly:
        """Room for ten bytes more."""

        def __init__(self, file):
            self._file, self.tell, self.truncate = file, file.tell, file.truncate

        def write(self, content):
            return self._file.write(content[:10])

    for mode in ("ab", "wb"):
        path = tmp_path / mode
        with path.open(mode, buffering=0) as file:
            files.append(file, b"a whole line\n")
            with pytest.raises(OSError, match="No space left"):
                files.append(Nearly(file), b"another that does not fit\n")
        assert path.read_bytes() == b"a whole line\n"


def test_a_run_begun_anew_draws_no_curves_of_the_one_before(tmp_path):
    pytest.importorskip("tensorboard")
    for after in (0, 0, 3):
        log = logs.Log(tmp_path, after)
        log.add({"step": after + 1, "loss": 1.0})
        log.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2  # the second, and what resumed it


def test_files_may_have_moved_on_a_resume(tmp_path):
    run = made("dense()")
    (tmp_path / logs.LOG).write_text("{}\n")
    (tmp_path / logs.CONFIG).write_text(config.to_toml(run))
    for data in ("fake", "elsewhere"):  # which is none of them
        with pytest.raises(Refused, match=r"other settings \(data\)"):
            runner.check_folder(replace(run, data=data), tmp_path, resume=True)
    (tmp_path / logs.CONFIG).write_text(config.to_toml(replace(run, data="here/digits")))
    runner.check_folder(replace(run, data="/there/digits"), tmp_path, resume=True)
