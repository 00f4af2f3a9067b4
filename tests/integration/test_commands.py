"""The command line and the examples, run as a person would."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import thinwire as package
from tests.commands import thinwire
from thinwire import recipes
from thinwire.describe import spell
from thinwire.recipes.recipe import list_options, read_docs
from thinwire_lab.cli.app import app
from thinwire_lab.local import netns, workers

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.slow


def run(*command: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd or ROOT, env={**os.environ, "COLUMNS": "80", **env},
        capture_output=True, text=True,
    )  # fmt: skip


def torchrun(workers: int, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}")
    return run(sys.executable, *launcher, *command, cwd=cwd)


def test_demo_is_honest() -> None:
    """The whole demo: all converge, and the slow link makes the smaller recipe the faster one."""
    done = run(str(BIN / "thinwire"), "demo", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    said = " ".join(done.stdout.split())
    assert "throttled in software to 20 Mbit/s per worker" in said
    assert "Only link time is simulated" in said and re.search(r"Done in \d+ s", said)
    row = r"^(dense|16 bits|tuned) +([\d.]+) +[\d.]+ +([\d.]+) % +([\d.]+)$"
    rows = {name: tuple(map(float, found)) for name, *found in re.findall(row, done.stdout, re.M)}
    assert list(rows) == ["dense", "16 bits", "tuned"], "all reach the accuracy"
    seconds, accuracies, sent = zip(*rows.values(), strict=True)
    assert 97.0 < accuracies[0] < 100.0, "dense has converged"
    assert min(accuracies) >= accuracies[0] - 1.5
    assert sent[0] == pytest.approx(160 * 4 * 85_002 / 1e6, abs=0.1)
    assert sent[1] == pytest.approx(sent[0] / 2, abs=0.1) and sent[2] < 1.05 * sent[0] / 20
    assert seconds[0] > seconds[2], "the link costs dense ten seconds, the recipe half of one"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("demo", "--worker", "2"), "No such option"),
        (("demo", "--workers", "0"), "greater than or equal to 1"),
        (("demo", "--workers", "two"), "parse string as an integer"),
        (("demo", "--link", "fast"), "a rate is a number and a unit"),
        (("dmeo",), "No such command"),
        (("list", "--net", "fast"), "a rate is a number and a unit"),
        (("list", "--params", "1.5"), "'1.5' is not a whole number, as 1000000 or 1e6"),
        (("list", "--params", "many"), "'many' is not a whole number"),
        (("list", "--k", "0"), "0 is not in the range x>=1"),
        (("trace", "--params", "1e1"), "1e1 is not in the range x>=100"),
        (("bench", "step", "--model", "smal"), "; did you mean small?"),
        (("trace", "--net", "fast"), "a rate is a number and a unit"),
        (("trace", "--recipe", "topk(wire='morse')"), "wire must be one of fp32, fp16"),
        (("trace", "--recipe", "topk(collective='pigeon')"), "collective must be one of gather"),
        (("trace", "--out", "README.md/x"), "cannot be made"),
        (("list", "--params", "10", "--k", "11"), "k must be at most d, got k=11, d=10"),
        (("bench", "selectors", "--density", "2"), "density must be in (0, 1], got 2.0"),
        (("bench", "step", "--recipe", "topq(1)"), "unknown recipe 'topq'; known are dense"),
        (("bench", "step", "--recipe", "topk(density=7)"), "density must be in (0, 1], got 7"),
        (
            ("list", "topq"),
            "unknown recipe 'topq'; known are dense",
        ),
        (
            ("bench", "step", "--model", "vgg"),
            "unknown model 'vgg'; there are mlp, vgg16",
        ),
        (("bench", "step", "--model", "nowhere:net"), "cannot load the model 'nowhere:net'"),
        (("bench", "step", "--net", "fast"), "a rate is a number and a unit"),
        (("bench", "collectives", "--comm", "pigeon"), "comm must be gloo or mpi, got 'pigeon'"),
        (("bench", "collectives", "--density", "2"), "density must be in (0, 1], got 2.0"),
    ],
)
def test_wrong_calls_exit_with_2(arguments: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert done.exit_code == 2
    assert said in " ".join(re.sub("[│╭╮╰╯─]", " ", done.output).split())
    assert "Traceback" not in done.output


@pytest.mark.parametrize("command", [(), ("train",), ("bench", "step")])
def test_help_has_a_short_form(command: tuple[str, ...]) -> None:
    short, long = (
        CliRunner().invoke(app, [*command, flag], env={"COLUMNS": "80"})
        for flag in ("-h", "--help")
    )
    assert short.exit_code == 0 and short.output == long.output
    assert max(map(len, short.output.splitlines())) <= 80


def test_the_version_names_the_code_and_torch() -> None:
    done = CliRunner().invoke(app, ["--version"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert done.output.startswith(f"thinwire {package.__version__}, ")
    assert done.output.endswith(f"torch {torch.__version__}\n") and done.output.count("\n") == 1


def test_completion_is_there() -> None:
    done = run(str(BIN / "thinwire"), _THINWIRE_COMPLETE="complete_bash", COMP_WORDS="thinwire tr",
               COMP_CWORD="1")  # fmt: skip
    assert sorted(done.stdout.split()) == ["trace", "train"], done.stderr


INTERRUPTED = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"


def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(INTERRUPTED)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "thinwire_lab", "demo"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path}, preexec_fn=heed_interrupts,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "thinwire: interrupted\n")


def test_the_command_itself_exits_with_2() -> None:
    done = run(str(BIN / "thinwire"), "list", "--net", "fast")
    assert done.returncode == 2
    assert "a rate is a number and a unit" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr and not done.stdout


def listed(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["list", *arguments], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    return done.output


def test_list_fits_a_screen() -> None:
    done = thinwire("list")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 40
    assert "\u2026" not in done.stdout, "nothing is cut"
    for name in recipes.names():
        assert name in done.stdout.split(), name


def test_list_says_what_exchanges_cost_and_what_to_train() -> None:
    for name in ("gTop-k", "TopkDSA", "Ok-Topk", "PowerSGD", "ACP-SGD"):
        assert name in listed("--costs").split(), name
    assert "resnet20" in listed("--jobs").split()


@pytest.mark.parametrize("name", ["topk", "adtopk", "powersgd", "dense"])
def test_list_shows_one_recipe_with_its_options(name: str) -> None:
    shown = " ".join(listed(name).split())
    recipe = getattr(recipes, name)
    says = read_docs(recipe)
    for text in (says.summary, says.text, says.example, says.source, "times fewer than dense"):
        assert text in shown
    table = listed(name)
    for option in list_options(recipe):
        assert f"{option.name}={spell(option.default)}" in table
        assert " ".join(option.meaning.split()[:3]) in shown


def test_list_as_json() -> None:
    done = thinwire("list", "--params", "1e6", "--world", "8", "--k", "1_000", "--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    assert [entry["name"] for entry in listed["recipes"]] == recipes.names()
    assert all(entry["source"] and entry["composition"] for entry in listed["recipes"])
    first = {option["name"]: option for option in listed["recipes"][1]["options"]}
    assert first["memory"]["default"] == "none" and first["memory"]["meaning"]
    assert listed["jobs"]["resnet20"]
    words = {cost["name"]: cost["words"] for cost in listed["costs"]}
    assert words["dense (ring)"] == 2 * 1_000_000 * 7 / 8
    assert words["Ok-Topk (worst)"] == 6 * 1000 * 7 / 8


def test_bench_selectors(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = thinwire("bench", "selectors", "--n", "20000", "--steps", "5", "--json", str(out))
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert all(0.5 <= row["fewest"] <= row["most"] <= 2 for row in figures["selectors"])
    shares = figures["rows that send nothing"]
    assert shares["adtopk(density=0.01)"] == 0 < shares["topk(density=0.01)"]


MODEL = """
import torch
def tiny(batch):
    return torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Linear(300, 10)), torch.randn(batch, 40)
def wrong(batch):
    return 7
"""  # noqa: E501
REFERENCES = [
    "no communication", "DDP, sends nothing", "plain DDP", "fp16 hook", "PowerSGD hook",
    "torch.topk by hand",
]  # fmt: skip


def test_bench_step(tmp_path: Path) -> None:
    """A model of the user's, over a network of a given rate where that can be made."""
    (tmp_path / "mine.py").write_text(MODEL)
    recipe = "topk(density=0.01)"
    net = "none" if netns.unavailable() else "1gbit"
    done = run(
        str(BIN / "thinwire"), "bench", "step", "--workers", "2", "--rounds", "1", "--recipe",
        recipe, "--model", "mine:tiny", "--net", net, "--json", "rows.json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [*REFERENCES, recipe]
    assert rows[6]["bytes_sent"] < rows[2]["bytes_sent"] / 20
    done = run(str(BIN / "thinwire"), "bench", "step", "--model", "mine:wrong", cwd=tmp_path)
    assert done.returncode == 2
    (told,) = done.stderr.splitlines()
    assert told == "thinwire: mine:wrong must return (module, inputs), got int"


def test_bench_kernels(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = thinwire("bench", "kernels", "--n", "200000", "--turns", "1", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 30
    assert all(row["seconds"] > 0 and row["unit"] > 0 for row in rows)


@pytest.mark.parametrize("comm", ["gloo", "mpi"])
def test_bench_collectives(comm: str, tmp_path: Path) -> None:
    if comm == "mpi" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun: install openmpi-bin")
    out = tmp_path / "rows.json"
    done = thinwire("bench", "collectives", "--numel", "20000", "--workers", "3", "--steps", "2",
                    "--comm", comm, "--json", str(out))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    figures = json.loads(out.read_text())
    (trial,) = figures["trials"]
    assert bool(figures["verbs"]) == (comm == "gloo")  # MPI has verbs of its own
    sent = {row["name"]: row["bytes_sent"] for row in trial["rows"]}
    assert sent["dense all-reduce"] == 2 * 2 * 80_000 // 3
    assert sent["Slots"] == sent["Slots, pairwise"] < sent["AllGather"] < sent["dense all-reduce"]


def test_bench_cost(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = thinwire("bench", "cost", "--model", "small", "--turns", "1", "--recipe", "int8()",
                    "--json", str(out))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert [row["name"] for row in json.loads(out.read_text())["rows"]][-1] == "int8()"
    refused = thinwire("bench", "cost", "--recipe", "topq()")
    assert refused.returncode == 2 and "topk" in refused.stderr


def test_trace(tmp_path: Path) -> None:
    """Tables within 80 columns, and files that say the same."""
    call = "slots(density=0.01, wire='bf16')"
    done = thinwire("trace", "--recipe", call, "--workers", "3", "--steps", "4",
                    "--params", "20000", "--out", str(tmp_path / "deep" / "out"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    for said in (
        "KB per step, from (row)",
        "cut",
        "split",
        "gather",
        "messages by size",
        "busiest",
    ):
        assert said in done.stdout
    files = {path.name: path.read_bytes() for path in (tmp_path / "deep" / "out").iterdir()}
    assert set(files) == {"trace.csv", "trace.json", "chrome.json", "pattern.png"}
    found = json.loads(files["trace.json"])
    sent = {p["what"]: p for p in found["predictions"]}
    assert sent["bytes"]["predicted"] == sent["bytes"]["measured"]
    rows = files["trace.csv"].decode().splitlines()
    assert rows[0] == "rank,step,phase,verb,peer,bytes,begin,seconds"
    assert len(rows) == 1 + 3 * (1 + 4 * 2 * 2)  # a ring's one neighbour once, two peers twice


@pytest.mark.skipif(netns.unavailable() is not None, reason=f"{netns.unavailable()}")
def test_trace_on_a_shaped_network() -> None:
    done = thinwire("trace", "--recipe", "dense()", "--workers", "2", "--steps", "3", "--net",
                    "50mbit", "--params", "100000")  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = re.search(r"and ([\d.]+) Mbit/s", " ".join(done.stdout.split()))
    assert told and 10 < float(told[1]) < 80, "loopback has thousands"


def children(pid: int) -> list[int]:
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listing.splitlines()]
    below = [child for child, parent in pairs if parent == pid]
    return below + [more for child in below for more in children(child)]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_process_stays_behind(sent: signal.Signals, code: int) -> None:
    """Ctrl-C, a termination, even a killed parent."""
    parent = subprocess.Popen(
        [str(BIN / "thinwire"), "demo", "--steps", "100000"], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=heed_interrupts,
    )  # fmt: skip
    while len(children(parent.pid)) < 4:
        assert parent.poll() is None, parent.communicate()
        time.sleep(0.2)
    time.sleep(1)  # into training
    started = children(parent.pid)
    assert len(started) >= 4
    if sent == signal.SIGINT:
        os.killpg(parent.pid, sent)  # a terminal's Ctrl-C reaches the whole group
    else:
        parent.send_signal(sent)
    _, errors = parent.communicate()
    assert parent.returncode == code, errors
    assert "Traceback" not in errors
    while any(alive(pid) for pid in started):  # for ever, if one stays behind
        time.sleep(0.2)


def heed_interrupts() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_ddp_example(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "ddp.py")
    first = torchrun(2, script, "--steps", "100", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "step 100: loss" in first.stdout
    assert "times less than dense" in first.stdout
    resume = ("--steps", "100", "--resume", "checkpoints")
    again = torchrun(2, script, *resume, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "step 200: loss" in again.stdout
    kept = sorted(path.name.rsplit("-", 1)[0] for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["0-00000100", "0-00000200", "1-00000100", "1-00000200"]
    newest = max((tmp_path / "checkpoints").glob("1-*"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    damaged = torchrun(2, script, *resume, cwd=tmp_path)
    assert damaged.returncode != 0 and f"{newest.name} is damaged; remove" in damaged.stderr


GONE = """
import atexit, weakref
import torch, torch.distributed as dist
import thinwire
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters())
sync = thinwire.distribute(optimizer, net.named_parameters(), thinwire.recipes.topk(0.5))
group = weakref.ref(sync._intake.peers.comm.group)
net(torch.ones(4)).sum().backward()
dist.destroy_process_group()
assert group() is not None
finalizers = weakref.finalize._exitfunc
atexit.unregister(finalizers)
finalizers()
assert group() is None, "its threads would outlive Python"
"""


def test_our_group_ends_before_python_does() -> None:
    """A gloo thread that is alive at the very end may kill the process (pytorch issue 190489)."""
    done = run(sys.executable, "-c", GONE)
    assert done.returncode == 0, done.stderr


UNCAUGHT = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import thinwire
dist.init_process_group("gloo")
net = torch.nn.Linear(4, 4)
model = DistributedDataParallel(net)
sync = thinwire.attach(model, thinwire.recipes.topk(0.5), timeout=60.0)
for step in range(3):
    if step == 2 and dist.get_rank() == 1:
        {}["what this batch lacks"]
    model(torch.ones(2, 4)).sum().backward()
"""


def test_what_ended_a_rank_is_told_by_the_others(tmp_path: Path) -> None:
    """An error that nobody caught goes to the other ranks before the process ends."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", UNCAUGHT], stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port,
                 "MASTER_ADDR": "127.0.0.1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    zero, one = (process.communicate(timeout=300)[1] for process in ranks)
    assert "KeyError: 'what this batch lacks'" in one
    assert "RankFailed: rank 1 failed after bucket 0 of step 1: KeyError:" in zero, zero


def test_optimizer_mode_example(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "optimizer_mode.py")
    done = torchrun(3, script, "--steps", "100", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "times less than dense" in done.stdout


def fails_on_rank_one(rank: int, world: int, report: object) -> None:
    if rank == 1:
        raise ArithmeticError("rank one cannot count")


def dies_on_rank_one(rank: int, world: int, report: object) -> None:
    dist.barrier()  # while others still connect, they would be the ones to fail
    if rank == 1:
        os._exit(7)
    time.sleep(60)


def is_killed_on_rank_one(rank: int, world: int, report: object) -> None:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # fails here at once, and must not be taken for the cause


def gives_what_cannot_be_sent(rank: int, world: int, report: object) -> object:
    return (number for number in range(3))


def test_local_workers_tell_what_went_wrong() -> None:
    with pytest.raises(workers.WorkerFailed, match="rank one cannot count"):
        workers.run(2, fails_on_rank_one)
    with pytest.raises(workers.WorkerFailed, match="worker 1 ended with exit code 7 and no result"):
        workers.run(2, dies_on_rank_one)
    with pytest.raises(workers.WorkerFailed, match=r"worker 1 was killed .* memory ran out; take"):
        workers.run(2, is_killed_on_rank_one)
    with pytest.raises(workers.WorkerFailed, match="exit code 0 and no result"):
        workers.run(1, gives_what_cannot_be_sent)
    with pytest.raises(ValueError, match="at least one worker is needed, got 0"):
        workers.run(0, fails_on_rank_one)
