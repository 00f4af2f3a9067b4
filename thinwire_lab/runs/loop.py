"""The one training loop: DDP, a recipe attached (or PyTorch's own way), and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.engine.ddp import attach
from thinwire.engine.session import Session
from thinwire.layout import Layout
from thinwire.protocols import Reducer
from thinwire_lab.errors import Refused, first_line
from thinwire_lab.jobs.data.source import Batch, Data, batches, pick_in_order
from thinwire_lab.jobs.job import LOWER, Settings, Task
from thinwire_lab.runs import checkpoint, optimizers
from thinwire_lab.runs.baselines import PLAIN, Baseline
from thinwire_lab.runs.config import BASELINES, Run
from thinwire_lab.runs.counters import Tally
from thinwire_lab.runs.launch import Worker, agree, gather, refuse_together
from thinwire_lab.runs.optimizers import Plateau
from thinwire_lab.runs.prefetch import Prefetch, Report, load_task, read_steps

Wrap = Callable[[Reducer], Reducer]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one training gave. `seconds` are training only; bytes are those a rank sent."""

    recipe: str
    figures: dict[str, float]
    loss: float  # mean of the last steps
    first_loss: float  # and of as many at the start
    steps: int
    seconds: float
    step_seconds: float  # median
    metrics: dict[str, Any]
    finished: bool  # whether all steps were taken


def count_steps(task: Task, settings: Settings, world: int) -> tuple[float, int]:
    """Steps per epoch, no whole number if several batches make a step; and steps in all."""
    per_epoch = max(1, len(task.train) // (settings.batch * world)) / settings.accumulate
    return per_epoch, settings.total(per_epoch)


def check_recipe(recipe: Reducer | None, net: nn.Module, world: int, total: int) -> None:
    """Refuse a recipe that has no answer for some parameter: its price says so, early and late."""
    if recipe is not None:
        layout = Layout.of(dict(net.named_parameters()))
        for step in (0, total - 1):
            recipe.traffic(layout, world, step)


def _check_precision(net: nn.Module, precision: str, device: torch.device) -> None:
    recurrent = any(isinstance(module, nn.RNNBase) for module in net.modules())
    if precision == "fp16" and device.type == "cpu" and recurrent:
        raise Refused("PyTorch has no fp16 LSTM on a CPU; give --set precision=bf16")


class Training:
    """A run on one worker: what it is made of, and what it has done so far."""

    def __init__(
        self, run: Run, worker: Worker, task: Task, wrap: Wrap = lambda recipe: recipe
    ) -> None:
        self.run, self.worker, self.task = run, worker, task
        settings, world = run.settings, worker.world
        torch.manual_seed(settings.seed)
        net = agree(task.net)  # a checkpoint may be missing on one machine
        self.net = net.to(worker.device).train()
        agree(partial(_check_precision, self.net, settings.precision, worker.device))
        recipe = run.reducer()
        if recipe is not None:
            recipe = optimizers.with_momentum(recipe, settings, world)
        self.clip = 0.0 if optimizers.corrects_momentum(recipe) else settings.clip
        self.optimizer = optimizers.optimizer_of(self.net, settings, world, recipe)
        self.per_epoch, self.total = count_steps(task, settings, world)
        agree(partial(check_recipe, recipe, self.net, world, self.total))
        scaled = settings.precision == "fp16"
        self.scaler = torch.amp.GradScaler(worker.device.type, enabled=scaled)
        self.sync: Session | None = None
        # a recipe is attached to plain DDP
        self._baseline = Baseline(BASELINES.get(run.recipe, PLAIN), self.net, settings.bucket_mb)
        self.model = self._baseline.model
        if recipe is not None:
            scaler = self.scaler if scaled else None
            self.sync = attach(self.model, wrap(recipe), optimizer=self.optimizer, scaler=scaler)
        torch.manual_seed(settings.seed * 1000 + worker.rank)  # dropout is every rank's own
        self.step = 0
        self.plateau = Plateau()
        self.tally = Tally(world)

    def take_step(self, step: list[Batch]) -> Tensor:
        """Train on these batches; their mean loss."""
        settings = self.run.settings
        scheduled = optimizers.rate_factor(settings, self.step, self.total, self.per_epoch)
        factor = self.plateau.factor * scheduled
        for group in self.optimizer.param_groups:
            group["lr"] = group["base"] * factor
        total = torch.zeros((), device=self.worker.device)
        for number, batch in enumerate(step, 1):
            with nullcontext() if number == len(step) else self.model.no_sync():
                total += self._backward(batch, len(step))
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=False)
        self.step += 1
        return total

    def _backward(self, batch: Batch, parts: int) -> Tensor:
        device, precision = self.worker.device, self.run.settings.precision
        batch = tuple(column.to(device, non_blocking=True) for column in batch)
        kind = torch.float16 if precision == "fp16" else torch.bfloat16
        with torch.autocast(device.type, dtype=kind, enabled=precision != "fp32"):
            loss = self.task.loss(self.model, batch) / parts
        self.scaler.scale(loss).backward()
        return loss.detach()

    def score(self) -> dict[str, float]:
        """Figures of the test data, every rank a share of it, with rank 0's running means."""
        for buffer in self.net.buffers():
            dist.broadcast(buffer, 0)
        figures, valid = self._score_on(self.task.test), self.task.valid
        if self.run.settings.schedule == "plateau":
            watched = figures if valid is None else self._score_on(valid)
            name, value = next(iter(watched.items()))
            self.plateau.add_score(self.run.settings, self.step, value if name in LOWER else -value)
        return figures

    def _score_on(self, data: Data) -> dict[str, float]:
        worker = self.worker
        picks = pick_in_order(len(data), 2 * self.run.settings.batch, worker.rank, worker.world)
        loader = batches(data, picks)
        self.net.eval()
        with torch.no_grad():
            moved = (tuple(c.to(worker.device) for c in batch) for batch in loader)
            rows = agree(lambda: self.task.rows(self.net, moved).cpu())
        self.net.train()
        return self.task.figures(torch.cat(gather(rows)))

    def count_sent(self) -> dict[str, Any]:
        """Totals of the run so far, all its parts together."""
        if self.sync is not None:
            return self.tally.add_before(dict(self.sync.metrics()))
        return {"skipped_steps": 0, **self._baseline.count_sent(self.step)}

    def record(self, **figures: float) -> dict[str, Any]:
        """Where the training stands."""
        sent = self.count_sent()
        return {"step": self.step, "total": self.total, "density": sent["density"],
                "bytes_sent": sent["bytes_sent"], **figures}  # fmt: skip

    def save(self, out: Path) -> None:
        shared = {
            "step": self.step, "run": asdict(self.run), "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict(),
            "plateau": asdict(self.plateau),
        }  # fmt: skip
        own = {
            "random": self._random(), "tally": self.tally.state(self.count_sent()),
            "sync": self.sync.state_dict() if self.sync is not None else {},
        }  # fmt: skip
        checkpoint.save(out, self.step, self.worker.rank, shared, own)

    def load(self, out: Path) -> None:
        """Load on all ranks. What is read is checked on all before any goes on."""
        shared, own = checkpoint.resume(out, self.worker.rank, self.worker.world)
        agree(lambda: _explain_foreign(out, lambda: self._apply(shared, own)))
        sync = self.sync
        if sync is not None:
            agree(lambda: _explain_foreign(out, lambda: sync.load_state_dict(own["sync"])))
        if self.step > self.total:
            raise Refused(
                f"{out} has taken {self.step} steps, more than the {self.total} asked for; give "
                "another --out"
            )

    def _apply(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        self.step = int(shared["step"])
        self.net.load_state_dict(shared["model"])
        self.optimizer.load_state_dict(shared["optimizer"])
        self.scaler.load_state_dict(shared["scaler"])
        self.plateau = Plateau(**shared.get("plateau", {}))
        self.tally.load(own["tally"])
        torch.set_rng_state(own["random"][0])
        if self.worker.device.type == "cuda":
            torch.cuda.set_rng_state(own["random"][1], self.worker.device)

    def _random(self) -> list[Tensor]:
        """What dropout will draw from."""
        device = self.worker.device
        on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device]


def train(
    worker: Worker,
    run: Run,
    *,
    out: Path | None = None,
    resume: bool = False,
    report: Report = lambda record: None,
    asked_to_stop: Callable[[], bool] = lambda: False,
    wrap: Wrap = lambda recipe: recipe,
    before: Callable[[Session], None] = lambda session: None,
    after: Callable[[nn.Module], None] = lambda net: None,
) -> Outcome:
    """Train as the run says.

    Args:
        out: folder of checkpoints; with `resume` the training goes on from the last of them.
        report: is given a record of every step and score, on all ranks alike.
        asked_to_stop: is asked after every step; if any rank says so, all stop together.
        wrap: what it makes of the recipe is attached.
        before, after: are given the session before training, the network after it.
    """
    training = Training(run, worker, load_task(run), wrap)
    if resume and out is not None:
        training.load(out)
    if training.sync is not None:
        before(training.sync)
    figures = _take_steps(training, out, report, asked_to_stop)
    outcome = training.tally.outcome(training.count_sent())
    training.tally.close()
    if training.sync is not None:
        training.sync.detach()
    after(training.net)
    finished = training.step >= training.total
    return Outcome(
        recipe=run.recipe, figures=figures, steps=training.step, finished=finished, **outcome
    )


def _explain_foreign(out: Path, work: Callable[[], None]) -> None:
    try:
        work()
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        said = first_line(error)
        raise Refused(f"the checkpoint in {out} is not of this run ({said})") from None


def _take_steps(
    training: Training, out: Path | None, report: Report, asked_to_stop: Callable[[], bool]
) -> dict[str, float]:
    """All that are left. What one rank is refused on the way ends all after the same step."""
    settings, tally = training.run.settings, training.tally
    score_every = settings.of_epochs(settings.score_every, training.per_epoch)
    save_every = settings.of_epochs(settings.save_every, training.per_epoch)
    figures: dict[str, float] = {}
    scored, saved = -1, training.step  # what was just loaded need not be saved
    stream = read_steps(training.task.train, settings, training.worker, training.step)
    ahead = Prefetch(stream, training.total - training.step, report)

    def score() -> None:
        nonlocal figures, scored
        figures, scored = training.score(), training.step
        ahead.report([training.record(elapsed=tally.seconds, **figures)])

    if training.step and score_every and training.step % score_every == 0:
        score()  # what was loaded was saved before its score, in which the run may have ended
    while training.step < training.total and not tally.stopping:
        tally.begin()
        loss = training.take_step(ahead.next())
        ahead.report(tally.end(loss, asked_to_stop() or bool(ahead.problem), training.record()))
        due = [bool(every and training.step % every == 0) for every in (score_every, save_every)]
        if due[0] or (due[1] and out is not None):
            ahead.report(tally.flush())
        if due[1] and out is not None:  # before the score, which may be refused
            training.save(out)
            saved = training.step
        if due[0]:
            score()
    ahead.report(tally.flush())
    if out is not None and saved != training.step:
        training.save(out)
    if training.step >= training.total and scored != training.step:
        score()
    refuse_together(ahead.problem)
    return figures
