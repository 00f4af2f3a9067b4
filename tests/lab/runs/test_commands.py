"""`train`, `compare` and `prove` as a user calls them: wrong calls, Ctrl-C, reports."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from thinwire_lab.cli.app import app
from thinwire_lab.cli.display import make_bars
from thinwire_lab.cli.train import _note
from thinwire_lab.jobs.catalogue import find
from thinwire_lab.jobs.job import Source
from thinwire_lab.local import netns, workers
from thinwire_lab.runs import checkpoint, config, ledger, logs, runner
from thinwire_lab.runs.versions import versions

CALL = [sys.executable, "-m", "thinwire_lab"]


def call(*args: str):
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "80"})


@pytest.mark.parametrize(
    ("args", "message"),
    [(["train", "resnet18"], "unknown job"), (["train", "mlp", "--recipe", "zip()"], "unknown rec"),
     (["train", "mlp", "--size", "big"], "--size is one of"),
     (["train", "vgg16", "--size", "paper"], "--size paper needs --data"),
     (["train", "mlp", "--data", "/no/such/place"], "there is no /no/such/place"),
     (["train", "mlp", "--out", "/proc/nothing"], "cannot write in /proc/nothing"),
     (["train", "mlp", "--resume", "/no/such/run"], "cannot read"),
     (["train", "mlp", "--set", "rate"], "--set takes name=value"),
     (["train", "mlp", "--epochs", "1", "--steps", "1"], "in epochs or in steps, not both"),
     (["train", "mlp", "--set", "rate=-1"], "rate must be above 0"),
     (["train", "mlp", "--set", "score_every=inf"], "score_every must be a finite number, got inf"),
     (["train", "mlp", "--set", "milestones=[[1]]"], "milestones is a list of numbers"),
     (["train", "mlp", "--resume", "a", "--out", "b"], "--resume goes on in its own folder"),
     (["train", "mlp", "--data", "d" * 300], "cannot read ddd"),
     (["train", "mlp", "--out", "d" * 300], "cannot write in ddd"),
     (["train", "mlp", "--recipe", "topk(density={'[a-z]d$': 0.1})"], "no density for parameter"),
     (["train", "mlp", "--recipe", "topk(density={'d$': 0.1}, warmup=9)"], "no density for para"),
     (["compare", "mlp", "--recipe", "dense()", "--seeds", "a"], "--seeds are numbers"),
     (["train", "mlp", "--set", "gamma=-5"], "gamma must be above 0"),
     (["train", "mlp", "--epochs", "1e308"], "epochs must be at most 1000000000, got 1e+308"),
     (["train", "mlp", "--set", "bucket_mb=1e300"], "bucket_mb must be at most 1000000000"),
     (["prove", "mlp", "--recipe", "fp16-hook"], "fp16-hook is PyTorch's own and cannot be looked"),
     (["prove", "mlp", "--recipe", "zip()"], "unknown recipe"),
     (["train", "mpl"], "; did you mean mlp?"),
     (["train", "mlp", "--size", "smal"], "; did you mean small?"),
     (["train", "mlp", "--recipe", "tpok(0.1)"], "; did you mean topk?"),
     (["train", "mlp", "--recipe", "dgc(densty=1)"], "; did you mean density?"),
     (["train", "mlp", "--set", "epoch=1"], "; did you mean epochs?"),
     (["train", "mlp", "--net", "100mb"], "a rate is a number and a unit")],
)  # fmt: skip
def test_wrong_calls_are_one_line_and_exit_code_2(args, message):
    result = call(*args, "--workers", "1")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line and " at 0x" not in line


@pytest.mark.parametrize("command", ["train", "compare", "prove"])
def test_workers_are_not_started_by_every_worker_of_a_launcher(command, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = call(command, "mlp", "--recipe", "dense()", "--workers", "2")
    assert result.exit_code == 2 and "launcher" in result.stderr


def test_a_page_that_cannot_be_made_is_told_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("thinwire_lab.report.page.find_spec", lambda name: None)
    for command in ("compare", "prove"):
        result = call(command, "mlp", "--recipe", "topk()", "--out", str(tmp_path / "x"))
        assert result.exit_code == 2 and "pip install 'thinwire[plots]'" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_every_job_of_a_comparison_must_find_its_data_before_the_first_begins(tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    for name in ("train", "valid", "test"):
        (data / f"wiki.{name}.tokens").write_text("a few words of it \n" * 400)
    result = call("compare", "lstm-lm", "mlp", "--recipe", "dense()", "--workers", "1", "--data",
                  str(data), "--out", str(out))  # fmt: skip
    assert result.exit_code == 2 and "MNIST" in result.stderr, result.output
    assert not out.exists()


def test_every_recipe_of_a_comparison_must_fit_before_the_first_begins(tmp_path):
    result = call("compare", "mlp", "--recipe", "dense()", "--recipe", "topk(density={'d$': 0.1})",
                  "--workers", "1", "--steps", "2", "--out", str(tmp_path / "out"))  # fmt: skip
    assert result.exit_code == 2 and "no density for parameter" in result.stderr, result.output
    assert not list(tmp_path.iterdir())


def test_what_is_done_needs_no_data_any_more(tmp_path):
    """Nor does a table of it."""
    for job, data in (("mlp", "/no/such/place"), ("lstm-lm", "/no/such/place")):
        run = config.make_run({"job": job, "data": data, "workers": 1})
        folder = tmp_path / runner.name_folder(run)
        folder.mkdir()
        (folder / logs.CONFIG).write_text(config.to_toml(run))
        done = {"recipe": "dense()", "figures": {"accuracy": 0.5}, "loss": 1.0, "first_loss": 2.0,
                "steps": 60, "seconds": 3.0, "step_seconds": 0.3, "finished": True,
                "metrics": {"bytes_sent": 9, "bytes_dense": 9, "steps": 60, "density": 1.0},
                }  # fmt: skip
        (folder / logs.RESULT).write_text(json.dumps(done))
    result = call("compare", "mlp", "lstm-lm", "--recipe", "dense()", "--workers", "1", "--data",
                  "/no/such/place", "--out", str(tmp_path))  # fmt: skip
    assert result.exit_code == 0 and result.output.count("50 %") == 2, result.output


@pytest.mark.parametrize("command", ["train", "compare", "prove"])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_nothing_is_left_of_a_run_without_data(command, workers, tmp_path):
    result = call(command, "mlp", "--workers", workers, "--data", "/no/such/place", "--out",
                  str(tmp_path / "some" / "run"), "--recipe", "topk()")  # fmt: skip
    assert result.exit_code == 2 and not list(tmp_path.iterdir())


def test_runs_that_differ_in_anything_have_folders_of_their_own():
    calls = [r"topk(density={'a\\.': 1.0, '': 0.1})", "topk(density={'a.': 1.0, '': 0.1})"]
    values = [{"job": "mlp", "recipe": call, "workers": workers, "settings": {"epochs": epochs}}
              for call in calls for workers in (2, 4) for epochs in (1, 2)]  # fmt: skip
    assert len({runner.name_folder(config.make_run(value)) for value in values}) == 8


@pytest.mark.slow
def test_the_data_that_comes_with_python_is_told_by_name(tmp_path):
    """In what is printed before and after, in the config, the log and the page."""
    out = tmp_path / "runs"
    result = call("compare", "resnet20", "--recipe", "dense()", "--steps", "2", "--workers", "1",
                  "--out", str(out))  # fmt: skip
    assert result.exit_code == 0, result.output
    assert 'data = "scikit-learn digits"' in result.output
    assert "resnet20, tiny, on scikit-learn digits" in result.output
    (run,) = (path.parent for path in out.glob("*/config.toml"))
    assert config.read_toml(run / logs.CONFIG)["data"] == "scikit-learn digits"
    assert config.make_run(config.read_toml(run / logs.CONFIG)).data is None
    assert logs.read_records(run / logs.LOG)[0] == {"step": 0, "data": "scikit-learn digits"}
    assert "resnet20: scikit-learn digits" in (out / "report.html").read_text()
    (line,) = ledger.read([out / ledger.NAME])
    assert line.versions == versions() and "scikit-learn digits" in line.place


@pytest.mark.slow
def test_training_leaves_a_whole_record(tmp_path):
    out = tmp_path / "run"
    result = call("train", "mlp", "--recipe", "topk(density=0.05)", "--steps", "30", "--workers",
                  "2", "--out", str(out), "--set", "score_every=0.1", "--set",
                  "save_every=0.2")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "accuracy" in result.output and 'recipe = "topk(density=0.05)"' in result.output
    records = logs.read_records(out / logs.LOG)
    assert [r["step"] for r in records if "seconds" in r] == list(range(1, 31))
    assert any("accuracy" in r for r in records)
    assert json.loads((out / logs.RESULT).read_text())["finished"] is True
    assert checkpoint.list_steps(out)[-1] == 30
    again = call("train", "mlp", "--workers", "1", "--out", str(out))
    assert again.exit_code == 2 and "holds a run already" in again.stderr
    longer = call("train", "mlp", "--resume", str(out), "--steps", "40")
    assert longer.exit_code == 0 and "workers = 2" in longer.output, longer.output
    assert checkpoint.list_steps(out)[-1] == 40 and len(checkpoint.list_steps(out)) == 2
    shorter = call("train", "mlp", "--resume", str(out), "--steps", "20")
    assert shorter.exit_code == 2 and "has taken 40 steps, more than the 20" in shorter.stderr
    assert json.loads((out / logs.RESULT).read_text())["steps"] == 40
    (out / logs.RESULT).unlink()  # as if it had been killed just before
    for _ in range(2):
        done = call("train", "mlp", "--resume", str(out))
        assert done.exit_code == 0 and "examples a second" in done.output, done.output
    assert json.loads((out / logs.RESULT).read_text())["step_seconds"] > 0


@pytest.mark.slow
def test_a_longer_run_that_was_interrupted_goes_on(tmp_path):
    """The result of the shorter run is not taken for its own."""
    out = tmp_path / "run"
    start = ["train", "mlp", "--workers", "1"]
    assert call(*start, "--steps", "4", "--out", str(out)).exit_code == 0
    settings = config.make_run(config.read_toml(out / logs.CONFIG))
    longer = replace(settings, settings=replace(settings.settings, steps=400))

    def killed(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run_local([(longer, out)], killed)
    assert not (out / logs.RESULT).exists()
    done = call("train", "mlp", "--resume", str(out))
    assert done.exit_code == 0 and json.loads((out / logs.RESULT).read_text())["steps"] == 400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "command"), [(signal.SIGTERM, "train"), (signal.SIGINT, "compare")]
)
def test_signals_finish_the_step_save_and_end(number, command, tmp_path):
    """Also where a whole group is told to end, and loaders with it; and twice within a moment, as
    `timeout` does it, which signals its command and then the group."""
    call = [command, "mlp", "--recipe", "dense()", "--steps", "100000", "--workers", "2",
            "--set", f"loaders={int(command == 'train')}"]  # fmt: skip
    with _begun([*call, "--out", str(tmp_path / "run")], tmp_path) as process:
        process.send_signal(number)
        os.killpg(process.pid, number)
        output, _ = process.communicate()
    assert process.returncode == 0, output
    (run,) = (path.parent for path in tmp_path.rglob(logs.LOG))
    *_, step = checkpoint.list_steps(run)
    stopped = f"after step {step}" if command == "train" else "after 0 of 1 runs; the same command"
    assert f"Stopped {stopped}" in output
    assert output.count("finishing the step; once more ends at once") == 1
    assert not list((run / "checkpoints").glob(".part*"))


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path):
    """The first is held back by a step that takes for ever: one of its workers sleeps."""
    call = ["train", "mlp", "--steps", "100000", "--workers", "2", "--out", str(tmp_path / "run")]
    with _begun(call, tmp_path) as process:
        worker = _worker_below(process.pid)
        os.kill(worker, signal.SIGSTOP)
        try:
            process.send_signal(signal.SIGINT)
            for line in process.stdout:  # until it has heard the first
                if "once more ends at once" in line:
                    break
            time.sleep(2 * workers.ECHO)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate()
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGCONT)
    assert process.returncode == 130 and "interrupted; all workers have ended" in output
    assert not os.path.exists(f"/proc/{worker}")


def test_signals_within_a_moment_are_one(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with workers._catch_signals(threading.Event()) as asked:
        for now[0] in (0.0, 0.9 * workers.ECHO):
            signal.raise_signal(signal.SIGTERM)
        assert asked == [signal.SIGTERM]
        now[0] = 1.1 * workers.ECHO
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)


def _steps(folder: Path) -> int:
    with suppress(FileNotFoundError):  # a folder that is tried out is there for a moment only
        return max((len(logs.read_records(p)) for p in folder.rglob(logs.LOG)), default=0)
    return 0


@contextmanager
def _begun(call, folder):
    """A command that has taken some steps."""
    process = subprocess.Popen(
        [*CALL, *call], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        while _steps(folder) <= 5:  # however long a busy machine takes
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        yield process
    finally:
        process.kill()


def _worker_below(pid):
    """A process far below this one: its nursery's child."""
    deepest = [pid]
    while deepest:
        found = deepest
        deepest = [
            int(child)
            for parent in found
            for tasks in Path(f"/proc/{parent}/task").glob("*/children")
            for child in tasks.read_text().split()
        ]
    if found == [pid]:
        pytest.skip("no /proc/PID/task/TID/children here")
    return found[0]


@pytest.mark.slow
def test_flags_win_over_a_file_and_settings_over_both(tmp_path):
    path, out = tmp_path / "mine.toml", tmp_path / "run"
    path.write_text(
        'job = "mlp"\nrecipe = "topk(density=0.2)"\nworkers = 1\n'
        "[settings]\nsteps = 3\nbatch = 8\nrate = 0.5\n"
    )
    result = call("train", "mlp", "--config", str(path), "--recipe", "dense()", "--batch", "4",
                  "--set", "rate=0.25", "--out", str(out))  # fmt: skip
    assert result.exit_code == 0, result.output
    run = config.make_run(config.read_toml(out / logs.CONFIG))
    assert (run.recipe, run.workers) == ("dense()", 1)
    assert (run.settings.steps, run.settings.batch, run.settings.rate) == (3, 4, 0.25)
    assert 'recipe = "dense()"' in result.output and "rate = 0.25" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("job", ["resnet20", "resnet50"])
def test_fake_pictures_at_full_size_take_steps(job):
    """The papers' throughput mode, with CIFAR's pictures and with ImageNet's."""
    if job == "resnet50":
        pytest.importorskip("transformers")
        task = find(job).make("paper", Source(data="fake"))
        assert task.train.batch(torch.tensor([0]), None)[0].shape == (1, 3, 224, 224)
    result = call("train", job, "--size", "paper", "--data", "fake", "--steps", "2", "--batch", "1",
                  "--workers", "1", "--recipe", "adtopk(density=0.01)",
                  "--set", "score_every=0")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "examples a second" in result.output


@pytest.mark.slow
@pytest.mark.skipif(netns.unavailable() is not None, reason=f"{netns.unavailable()}")
def test_workers_have_the_links_asked_for(tmp_path):
    """A step takes at least as long as its bytes do on such a link (less what a bucket holds)."""
    result = call("compare", "mlp", "--recipe", "dense()", "--steps", "4", "--workers", "2",
                  "--net", "4mbit", "--out", str(tmp_path))  # fmt: skip
    assert result.exit_code == 0, result.output
    (line,) = ledger.read([tmp_path / ledger.NAME])
    bits = 8 * line.outcome.metrics["bytes_sent"] / line.outcome.steps
    assert line.net == "4mbit" and line.outcome.step_seconds > 0.5 * bits / 4e6


@pytest.mark.slow
def test_compare_makes_one_table_and_one_page(tmp_path):
    file = tmp_path.with_suffix(".toml")
    file.write_text("workers = 2\n[settings]\nsteps = 20\n")
    args = ["compare", "mlp", "--recipe", "ddp", "--recipe", "topk(density=0.05)", "--config",
            str(file), "--seeds", "0,1", "--out", str(tmp_path)]  # fmt: skip
    result = call(*args)
    assert result.exit_code == 0, result.output
    assert "workers = 2" in result.output and "steps = 20" in result.output  # printed back
    shown = "".join(result.output.split())  # the table is folded into 80 columns
    assert "accuracy" in shown and shown.count("(2)") == 2 and "topk(dens" in shown
    first = {}
    for path in tmp_path.glob("mlp-*/log.jsonl"):
        records = [r for r in logs.read_records(path) if "loss" in r]
        assert len(records) == 20
        first.setdefault(path.parent.name.split("-seed")[1][0], set()).add(records[0]["loss"])
        assert list((path.parent / "tensorboard").iterdir()) or not find_spec("tensorboard")
    # recipes begin alike, seeds do not
    assert [len(losses) for losses in first.values()] == [1, 1] and first["0"] != first["1"]
    text = (tmp_path / "report.html").read_text()
    HTMLParser().feed(text)
    assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text
    assert "<script" not in text and text.count("<svg") == 7  # one score per run is no curve
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("mlp-*/log.jsonl")}
    again = call(*args)  # what is done is not done again
    assert again.exit_code == 0
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("mlp-*/log.jsonl")}
    assert len(list(tmp_path.glob("mlp-*/result.json"))) == 4
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 4


@pytest.mark.slow
def test_ok_topks_study_is_one_command_and_one_table(tmp_path):
    """The command in the documents, with fewer workers and steps."""
    pytest.importorskip("transformers")
    text = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    (command,) = re.findall(r"^thinwire (compare vgg16 lstm-an4 bert .*?study)$", text, re.M | re.S)
    args = shlex.split(command.replace("\\\n", " "))
    args[args.index("--workers") + 1], args[args.index("--out") + 1] = "2", str(tmp_path)
    result = call(*args, "--steps", "1")
    assert result.exit_code == 0, result.output
    table = result.output[result.output.rindex("score") :]
    for job in ("vgg16", "lstm-an4", "bert"):
        calls = re.findall(rf"{job}, (\w+)", table)
        assert calls == ["dense", "topk", "topkdsa", "gtopk", "gaussiank", "slots", "oktopk"]
    assert len(ledger.read([tmp_path / ledger.NAME])) == 21


@pytest.mark.slow
def test_prove_tells_adtopk_from_topk(tmp_path):
    forgets = "adtopk(density=0.05, memory=Residual(decay=0.0))"
    asked = [word for call in ("adtopk(density=0.05)", "topk(density=0.05)", forgets)
             for word in ("--recipe", call)]  # fmt: skip
    result = call("prove", "mlp", *asked, "--steps", "30", "--workers", "2", "--out", str(tmp_path))
    proofs = json.loads((tmp_path / "proof.json").read_text())
    found = {p["recipe"]: {v["what"]: v for v in p["verdicts"]} for p in proofs}
    assert found["adtopk(density=0.05)"]["rows missing"]["value"] == 0.0
    assert found["topk(density=0.05)"]["rows missing"]["value"] > 0.0
    assert [found[call]["residual lost"]["held"] for call in found] == [True, True, False]
    asked = [v for verdicts in found.values() for v in verdicts.values() if v["held"] is not None]
    assert len(asked) > 12 and all((v["margin"] >= 0) is v["held"] for v in asked)
    held = {call: found[call]["rows missing"]["held"] for call in found}
    assert held == {"adtopk(density=0.05)": True, "topk(density=0.05)": None, forgets: True}
    assert result.exit_code == 3 and "violated" in result.output
    page = (tmp_path / "proof.html").read_text()
    assert page.count("<svg") == 8 and f"Violated in {forgets} (residual lost" in page


@pytest.mark.slow
def test_prove_takes_the_make_settings_a_training(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("workers = 1\n[settings]\nbatch = 4\nepochs = 0.02\n")
    result = call("prove", "mlp", "--recipe", "topk()", "--recipe", "int8()", "--config", str(file),
                  "--seed", "3", "--set", "momentum=0.5")  # fmt: skip
    assert result.exit_code == 0, result.output
    for line in ('recipe = [', "workers = 1", "batch = 4", "epochs = 0.02", "steps = 0", "seed = 3",
                 "momentum = 0.5"):  # fmt: skip
        assert line in result.stdout, line


@pytest.mark.slow
def test_prove_prints_json():
    result = call("prove", "mlp", "--recipe", "int8()", "--steps", "4", "--workers", "1", "--json")
    assert result.stdout.startswith("[")  # and no bar before it
    (proof,) = json.loads(result.stdout)
    assert result.exit_code == 0 and proof["recipe"] == "int8()" and proof["verdicts"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 400 KB: too small for a checkpoint."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.geteuid() == 0 and shutil.which("mount")
    made = mounted and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)], capture_output=True
    )
    if not made or made.returncode:
        pytest.skip("only root can make a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("command", ["train", "prove"])
def test_no_room_for_temporary_files_is_one_line(command, monkeypatch):
    def full(*args, **keywords):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    result = call(command, "mlp", "--recipe", "dense()", "--steps", "4")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, result.output
    assert "no room for temporary files (No space left on device); set TMPDIR" in result.stderr


@pytest.mark.slow
def test_a_full_disk_is_one_line_exit_code_2_and_nothing_half_written(small_disk):
    result = call(
        "train", "mlp", "--workers", "2", "--steps", "20", "--out", str(small_disk / "run")
    )
    assert result.exit_code == 2, result.output
    said = " ".join(result.output.split())
    assert re.search(r"cannot save a checkpoint in \S+: No space left on device", said), said
    assert "Traceback" not in result.output
    assert not list(small_disk.rglob("*.part*")) and not checkpoint.list_steps(small_disk / "run")
    text = (small_disk / "run" / logs.LOG).read_text()
    assert text.endswith("\n") and all(json.loads(line) for line in text.splitlines())


@pytest.mark.slow
def test_a_full_disk_ends_comparisons_and_proofs_likewise(small_disk):
    for command in ("compare", "prove"):
        if command == "prove":
            with suppress(OSError), (small_disk / "filled").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            os.truncate(small_disk / "filled", (small_disk / "filled").stat().st_size - 8192)
        result = call(command, "mlp", "--recipe", "topk()", "--workers", "1", "--steps", "60",
                      "--out", str(small_disk / command))  # fmt: skip
        assert result.exit_code == 2 and "Traceback" not in result.output, result.output
        assert len(result.stderr.splitlines()) == 1 and "cannot" in result.stderr
        assert not list(small_disk.rglob("*.part*"))


@pytest.mark.slow
def test_nowhere_to_print_is_one_line():
    book = Path(__file__).parents[3] / "docs" / "results" / "vgg16.jsonl"
    with open("/dev/full", "w") as full:
        done = subprocess.run([*CALL, "results", str(book)], stdout=full, stderr=subprocess.PIPE,
                              text=True)  # fmt: skip
    message = "thinwire: cannot write its output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_the_bar_tells_loss_throughput_bytes_and_density():
    run = config.make_run({"job": "mlp", "settings": {"batch": 16, "accumulate": 2}})
    record = {"step": 3, "total": 9, "density": 0.0123, "bytes_sent": 2_500_000, "elapsed": 1.0,
              "seconds": 0.5, "loss": 1.23456}  # fmt: skip
    assert _note(record, run, 4) == "loss 1.235, 256/s, 2.5 MB, 1.23 %"
    assert _note(record | {"density": 1.0}, run, 4).endswith(" 100 %")
    score = {k: record[k] for k in ("step", "total", "density", "bytes_sent", "elapsed")}
    assert _note(score | {"accuracy": 0.5}, run, 4) == "accuracy 0.5"


@pytest.mark.parametrize("width", [80, 120])
def test_steps_can_be_read_in_a_narrow_terminal(width):
    out = io.StringIO()
    progress = make_bars(Console(file=out, width=width))
    task = progress.add_task("gtopk(density=Flushed(Ramp(start=0.3", total=100_000, note="")
    progress.update(task, completed=31_234, note="loss 10.123, 1256/s, 2500.1 MB, 100 %")
    progress.console.print(progress.get_renderable())
    assert "31234/100000" in out.getvalue() and "2500.1 MB, 100 %" in out.getvalue()
    assert out.getvalue().startswith("gtopk(dens")


def test_the_command_line_lists_the_jobs():
    assert "lstm-an4" in call("list", "--jobs").output
