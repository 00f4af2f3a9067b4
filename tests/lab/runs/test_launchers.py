"""`train` under torchrun, mpirun and srun: the same command without --workers, one voice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest

from thinwire_lab.bench.collectives import mpirun
from thinwire_lab.errors import Refused, UnsharedError
from thinwire_lab.local import netns
from thinwire_lab.runs import checkpoint, launch, logs
from thinwire_lab.runs.launch import agree, find_launcher

START = [sys.executable, "-m", "thinwire_lab"]
CALL = [*START, "train", "mlp", "--steps", "10"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]


def torchrun(*args):
    return _done([*TORCHRUN, *CALL[1:], *args], {})


def under_mpi(*args):
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun: install openmpi-bin")
    return _done([*mpirun(2), *CALL, *args], {})


def begun(*args, of_rank=lambda rank: ()):
    """The steps of a Slurm job. There is no Slurm here; what they see of it is this."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7",
              "SLURM_STEP_NODELIST": "node[1-2]",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    return [
        subprocess.Popen(
            [*CALL, *args, *of_rank(rank)], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(shared | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}),
        )
        for rank in range(2)
    ]  # fmt: skip


def slurm(*args):
    return _ended(begun(*args))


def _ended(steps):
    try:
        outputs = [step.communicate() for step in steps]
    finally:
        for step in steps:
            step.kill()
    code = max(step.returncode for step in steps)
    return code, "".join(out for out, _ in outputs), "".join(err for _, err in outputs)


def _done(command, more):
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(more))
    return done.returncode, done.stdout, done.stderr


def _environment(more):
    return os.environ | {"OMP_NUM_THREADS": "1"} | more


@pytest.mark.slow
@pytest.mark.parametrize("start", [torchrun, under_mpi, slurm])
def test_launchers_need_no_workers(start, tmp_path):
    out = tmp_path / "run"
    code, printed, complaints = start("--out", str(out))
    assert code == 0, complaints
    assert printed.count("x less") == 1  # rank 0 alone prints
    assert json.loads((out / logs.RESULT).read_text())["steps"] == 10


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "times"), [(0, 1), (1, 2)])
def test_a_signal_to_one_ends_all_after_the_same_step(rank, times, tmp_path):
    """Twice at once, as a launcher sends it that signals its processes and their group, is one."""
    steps = begun("--steps", "100000", "--out", str(tmp_path))
    _underway(tmp_path, steps)
    for _ in range(times):
        steps[rank].send_signal(signal.SIGTERM)
        time.sleep(0.05)
    code, printed, complaints = _ended(steps)
    assert code == 0, complaints
    *_, step = checkpoint.list_steps(tmp_path)
    assert f"Stopped after step {step}; go on with --resume" in " ".join(printed.split())


@pytest.mark.slow
def test_who_asks_again_does_not_wait(tmp_path):
    first, second = steps = begun("--steps", "100000", "--out", str(tmp_path))
    _underway(tmp_path, steps)
    second.send_signal(signal.SIGSTOP)  # nobody gets on with a step
    while first.poll() is None:  # a busy machine may take several for one that came twice
        first.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    assert first.returncode == -signal.SIGTERM
    second.send_signal(signal.SIGCONT)
    _ended([first, second])


def _underway(folder, steps):
    while len(logs.read_records(folder / logs.LOG)) < 5:
        assert all(step.poll() is None for step in steps), _ended(steps)
        time.sleep(0.05)


@pytest.mark.slow
def test_comparisons_take_part_too(tmp_path):
    call = ["compare", "mlp", "--recipe", "dense()", "--recipe", "topk()", "--steps", "5"]
    code, printed, complaints = _done([*TORCHRUN, *START[1:], *call, "--out", str(tmp_path)], {})
    assert code == 0, complaints
    assert printed.count("x less") == 1 and (tmp_path / "report.html").exists()
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("start", [under_mpi])
def test_what_all_are_refused_is_said_once(start):
    """torchrun too, but for what it says of itself."""
    code, _, complaints = start("--data", "/no/such/place")
    assert code == 2
    assert complaints.count("there is no /no/such/place") == 1
    assert "Traceback" not in complaints


@pytest.mark.slow
@pytest.mark.parametrize("lacking", [(1,), (0, 1)])
def test_a_file_that_some_lack_is_said_once(lacking, tmp_path):
    """The others have joined by then, and must not wait for it."""
    (tmp_path / "0.toml").write_text('recipe = "dense()"')
    (tmp_path / "1.toml").write_text('recipe = "dense()"')
    for rank in lacking:
        (tmp_path / f"{rank}.toml").unlink()
    steps = begun(of_rank=lambda rank: ("--config", str(tmp_path / f"{rank}.toml")))
    code, _, complaints = _ended(steps)
    assert code == 2 and "Traceback" not in complaints
    assert complaints.count("thinwire:") == 1
    who = "" if 0 in lacking else "worker 1: "
    assert f"thinwire: {who}cannot read {tmp_path / f'{lacking[0]}.toml'}" in complaints


def test_a_rank_that_finds_nobody_says_it_itself(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(launch, "PATIENCE", timedelta(seconds=1))
    with pytest.raises(UnsharedError, match=r"^worker 1: no such thing$"), \
         launch.share_refusals(tmp_path):  # fmt: skip
        raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, None), ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 4, 1)),
     ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2, 0)),
     ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script is no task
     ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}, (5, 8, 1))],
)  # fmt: skip
def test_launchers_are_recognised(variables, expected, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK",
                 "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert find_launcher() == expected


def test_without_scontrol_the_first_machine_must_be_given(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-2]")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=r"first of the machines node\[1-2\]; set MASTER_ADDR"):
        launch._find_first_host()


def test_with_scontrol_the_first_machine_is_found(monkeypatch, tmp_path):
    tool = tmp_path / "scontrol"
    tool.write_text('#!/bin/sh\n[ "$1 $2 $3" = "show hostnames node[1-2]" ] && echo node1 node2\n')
    tool.chmod(0o755)
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-2]")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert launch._find_first_host() == "node1"


def test_workers_of_a_job_find_one_port_and_other_jobs_another(monkeypatch):
    ports = set()
    for job in range(20):
        monkeypatch.setenv("SLURM_JOB_ID", str(job))
        ports.add(launch._choose_port())
        assert launch._choose_port() in ports and 20_000 <= launch._choose_port() < 40_000
    assert len(ports) == 20


def test_a_refusal_reaches_all_ranks_in_the_words_of_the_first(pool):
    for who, expected in ((None, "fine"), (0, "no disk 0"), (2, "worker 2: no disk 2")):
        assert pool.run(3, _agreement, who) == [expected] * 3


def _agreement(rank, world, who):
    def work():
        if rank == who:
            raise ValueError(f"no disk {rank}")

    try:
        agree(work)
    except Refused as error:
        return str(error)
    return "fine"


def on_two_machines(*more):
    """Of one worker each, with such variables besides; codes, and what each said."""
    with netns.shape_network(2, "1gbit") as spaces:
        both = [
            subprocess.Popen(
                ["ip", "netns", "exec", space, *START, "train", "mlp", "--steps", "2"],
                text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=_environment({
                    "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0",
                    "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29517", **more[rank],
                }),
            )
            for rank, space in enumerate(spaces)
        ]  # fmt: skip
        said = [step.communicate()[1] for step in both]
    return [step.returncode for step in both], said


MACHINES = pytest.mark.skipif(netns.unavailable() is not None, reason=f"{netns.unavailable()}")


@MACHINES
def test_machines_that_take_their_name_for_loopback_are_told_the_variable_to_set():
    """Two machines whose host name resolves to 127.0.0.1, as Debian has it: one line on both."""
    codes, said = on_two_machines({}, {})
    assert codes == [2, 2], said
    for complaint in said:
        assert complaint.count("set GLOO_SOCKET_IFNAME") == 1
        assert "worker 0 would tell other machines its loopback address 127.0.0.1" in complaint
        assert "eth0 10.77.0.1" in complaint
        assert "Traceback" not in complaint


@MACHINES
def test_an_interface_that_is_not_there_is_refused_on_both_machines():
    codes, said = on_two_machines(
        {"GLOO_SOCKET_IFNAME": netns.INTERFACE}, {"GLOO_SOCKET_IFNAME": "enp9s9"}
    )
    assert codes == [2, 2], said
    for complaint in said:
        assert "GLOO_SOCKET_IFNAME of worker 1 names no interface" in complaint
        assert "set it to one of lo 127.0.0.1, eth0 10.77.0.2" in complaint
        assert "Traceback" not in complaint
