"""Worker processes on this machine, started and ended by us.

`run(world, function, *args)` calls `function(rank, world, report, *args)` in `world` fresh
processes joined by gloo, over loopback or a shaped network, and returns their results. However it
ends (return, error, Ctrl-C, SIGTERM, a killed parent), no process stays behind.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from thinwire_lab.errors import Refused, WorkerFailed
from thinwire_lab.local import netns

T = TypeVar("T")
POLL = 0.1
ECHO = 0.3  # seconds: `timeout` signals its command and then the whole group, which has it twice


def run(
    world: int,
    function: Callable[..., T],
    *args: Any,
    on_report: Callable[[Any], None] = lambda message: None,
    net: str = "none",
    stop: Any = None,
    on_stop: Callable[[], None] = lambda: None,
) -> list[T]:
    """Results in rank order; `on_report` gets what workers report, as it comes.

    With `net`, a rate like 1gbit, the workers have links of that rate to each other. With `stop`,
    a `make_event()` that is also among the arguments, the first SIGINT or SIGTERM sets it and calls
    `on_stop`, and the workers may end by themselves. The second signal ends them.
    """
    if world < 1:
        raise ValueError(f"at least one worker is needed, got {world}")
    context = choose_context()
    messages: multiprocessing.Queue[Any] = context.Queue()
    shape = netns.shape_network(world, net) if net != "none" else nullcontext([None] * world)
    with (
        _catch_signals(stop) as asked,
        _make_folder() as folder,
        shape as spaces,
    ):
        store = os.path.join(folder, "store")
        workers = [
            context.Process(
                target=_work,
                args=(rank, world, store, spaces[rank], dict(os.environ), messages, function, args),
            )
            for rank in range(world)
        ]
        try:
            with _hold_signals():
                for worker in workers:
                    worker.start()
            return _collect(workers, messages, on_report, asked, on_stop)
        finally:
            _end(workers)


def _make_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="thinwire-")
    except OSError as error:
        raise Refused(
            f"there is no room for temporary files ({error.strerror}); set TMPDIR to a folder that "
            "can be written"
        ) from None


def _collect(
    workers: list[Any],
    messages: Any,
    on_report: Callable[[Any], None],
    asked: list[int],
    on_stop: Callable[[], None],
) -> list[Any]:
    """Results of all. Once a signal has asked them to stop, `on_stop` is called: here and not in
    the signal's handler, where hardly anything may be done, nor by looking at the event, whose lock
    the handler would then wait for."""
    results: dict[int, Any] = {}
    silent, told = 0, False
    while len(results) < len(workers):
        if asked and not told:
            told = True
            on_stop()
        try:
            rank, kind, value = messages.get(timeout=POLL)
        except queue.Empty:
            ended = [
                r for r, w in enumerate(workers) if w.exitcode is not None and r not in results
            ]
            dead = [rank for rank in ended if workers[rank].exitcode != 0]
            silent = silent + 1 if ended else 0  # a result may still be in the pipe
            if dead or silent > 20:
                dead = dead or ended
                raise WorkerFailed(_describe_end(dead[0], workers[dead[0]].exitcode)) from None
            continue
        if kind == "report":
            on_report(value)
        elif kind == "refused":
            raise Refused(value)
        elif kind == "error":
            raise _find_cause(workers, messages, f"worker {rank} failed:\n{value}")
        else:
            results[rank] = value
    return [results[rank] for rank in range(len(workers))]


def _describe_end(rank: int, code: int) -> str:
    """How a worker ended that gave no result."""
    if code == -signal.SIGKILL:  # nobody else sends it to a single worker
        return (
            f"worker {rank} was killed (SIGKILL), most likely because memory ran out; take fewer "
            "workers, a smaller model or smaller batches"
        )
    if code < 0:
        return f"worker {rank} was ended by {signal.Signals(-code).name} and gave no result"
    return f"worker {rank} ended with exit code {code} and no result"


def _find_cause(workers: list[Any], messages: Any, text: str) -> Exception:
    """Another worker may have been killed, or refused something, and the one that failed missed it
    first."""
    end = time.monotonic() + 1.0
    while (left := end - time.monotonic()) > 0:
        try:
            _, kind, value = messages.get(timeout=left)
        except queue.Empty:
            break
        if kind == "refused":
            return Refused(value)
    for rank, worker in enumerate(workers):
        if (worker.exitcode or 0) < 0:
            return WorkerFailed(_describe_end(rank, worker.exitcode))
    return WorkerFailed(text)


def _end(workers: list[Any]) -> None:
    for worker in workers:
        if worker.pid is not None:
            worker.kill()  # it ignores gentler ways
            worker.join()


def _work(
    rank: int,
    world: int,
    store: str,
    space: str | None,
    environment: dict[str, str],
    messages: Any,
    function: Callable[..., Any],
    args: Any,
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # which may come to the whole group
        signal.signal(number, signal.SIG_IGN)  # the parent alone decides how to end
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()  # it is the nursery's, as it was when that began
    os.environ.update(environment)
    if space is None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        netns.enter(space)
        os.environ["GLOO_SOCKET_IFNAME"] = netns.INTERFACE
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        result = function(
            rank, world, lambda message: messages.put((rank, "report", message)), *args
        )
        messages.put((rank, "result", result))
        dist.barrier()  # nobody leaves while another still talks
        dist.destroy_process_group()
    except Refused as error:
        messages.put((rank, "refused", str(error)))
    except Exception:
        messages.put((rank, "error", traceback.format_exc()))


def _end_with_parent() -> None:
    """Returns never; a pipe tells of the parent's end, also if that was before we began."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


@contextmanager
def _hold_signals() -> Iterator[None]:
    """Both may come to the whole group, also to workers that have just been born and to the
    nursery, which would end: they inherit this, and we hear of it right after."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def choose_context() -> Any:
    """How to make processes: fork them from one that has loaded torch, which costs seconds."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["thinwire_lab.local.nursery"])
    return context


def make_event() -> Any:
    """A flag that all workers see."""
    return choose_context().Event()


@contextmanager
def _catch_signals(stop: Any) -> Iterator[list[int]]:
    """SIGTERM runs the same clean-up as an error does (only the main thread may ask for that).

    Yields the signals that only have set the flag.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    since = 0.0

    def first(number: int, frame: object) -> None:
        """Sets the flag; the second signal does what signals do."""
        nonlocal since
        if asked and time.monotonic() - since < ECHO:
            return
        if asked or stop is None:
            _leave(number)
        since = time.monotonic()
        asked.append(number)
        stop.set()

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, first)}
    if stop is not None:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, first)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
