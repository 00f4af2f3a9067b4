"""The one training loop: DDP, a recipe attached (or PyTorch's own way), and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.engine.ddp import attach
from thinwire.engine.session import Session
from thinwire.jobs import saved
from thinwire.jobs.ahead import Ahead, Tell, parts, same_data
from thinwire.jobs.config import BASELINES, Run
from thinwire.jobs.data.source import Batch, Data, batches, in_order
from thinwire.jobs.descent import Plateau, corrects_momentum, factor, optimizer_of, with_momentum
from thinwire.jobs.job import LOWER, Settings, Task
from thinwire.jobs.launch import Place, agreed, gathered
from thinwire.jobs.tally import Tally
from thinwire.lab.baselines import Baseline
from thinwire.lab.workers import Refused
from thinwire.layout import Layout
from thinwire.protocols import Reducer

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


def length(task: Task, settings: Settings, world: int) -> tuple[float, int]:
    """Steps of an epoch, no whole number if several batches make a step; and steps of all."""
    each = max(1, len(task.train) // (settings.batch * world)) / settings.accumulate
    return each, settings.total(each)


def fits(recipe: Reducer | None, net: nn.Module, world: int, total: int) -> None:
    """Its price says whether it knows what to do with every parameter, early and late."""
    if recipe is None:
        return
    layout = Layout.of(dict(net.named_parameters()))
    for step in (0, total - 1):
        recipe.traffic(layout, world, step)


def _computable(net: nn.Module, precision: str, device: torch.device) -> None:
    recurrent = any(isinstance(module, nn.RNNBase) for module in net.modules())
    if precision == "fp16" and device.type == "cpu" and recurrent:
        raise Refused("PyTorch has no fp16 LSTM on a CPU; give --set precision=bf16")


class Training:
    """A run on one worker: what it is made of, and what it has done so far."""

    def __init__(
        self, run: Run, place: Place, task: Task, wrap: Wrap = lambda recipe: recipe
    ) -> None:
        self.run, self.place, self.task = run, place, task
        settings = run.settings
        torch.manual_seed(settings.seed)
        made: list[nn.Module] = []
        agreed(lambda: made.append(task.net()))  # a checkpoint may be missing on one machine
        self.net = made[0].to(place.device).train()
        agreed(partial(_computable, self.net, settings.precision, place.device))
        recipe = run.reducer()
        if recipe is not None:
            recipe = with_momentum(recipe, settings, place.world)
        self.clip = 0.0 if corrects_momentum(recipe) else settings.clip
        self.optimizer = optimizer_of(self.net, settings, place.world, recipe)
        self.each, self.total = length(task, settings, place.world)
        agreed(partial(fits, recipe, self.net, place.world, self.total))
        scaled = settings.precision == "fp16"
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=scaled)
        self.sync: Session | None = None
        if recipe is None:
            baseline = Baseline(BASELINES[run.recipe], self.net, settings.bucket_mb)
            self.model, self._baseline = baseline.model, baseline
        else:
            self.model = DistributedDataParallel(
                self.net, gradient_as_bucket_view=True, bucket_cap_mb=settings.bucket_mb
            )
            scaler = self.scaler if scaled else None
            self.sync = attach(self.model, wrap(recipe), optimizer=self.optimizer, scaler=scaler)
        torch.manual_seed(settings.seed * 1000 + place.rank)  # dropout is every rank's own
        self.step = 0
        self.plateau = Plateau()
        self.tally = Tally(place.world, sum(p.numel() for p in self.net.parameters()))

    def take(self, part: list[Batch]) -> Tensor:
        """One step over these batches; their mean loss."""
        settings = self.run.settings
        rate = self.plateau.factor * factor(settings, self.step, self.total, self.each)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base"] * rate
        total = torch.zeros((), device=self.place.device)
        for number, batch in enumerate(part):
            if number + 1 < len(part):
                with self.model.no_sync():
                    total += self._backward(batch, len(part))
            else:
                total += self._backward(batch, len(part))
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=False)
        self.step += 1
        return total

    def _backward(self, batch: Batch, parts: int) -> Tensor:
        device, precision = self.place.device, self.run.settings.precision
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
        figures, valid = self._figures(self.task.test), self.task.valid
        if self.run.settings.schedule == "plateau":
            heard = figures if valid is None else self._figures(valid)
            name, value = next(iter(heard.items()))
            self.plateau.hear(self.run.settings, self.step, value if name in LOWER else -value)
        return figures

    def _figures(self, data: Data) -> dict[str, float]:
        place = self.place
        picks = in_order(len(data), 2 * self.run.settings.batch, place.rank, place.world)
        loader = batches(data, picks)
        self.net.eval()
        rows: list[Tensor] = []
        with torch.no_grad():
            moved = (tuple(c.to(place.device) for c in batch) for batch in loader)
            agreed(lambda: rows.append(self.task.rows(self.net, moved).cpu()))
        self.net.train()
        return self.task.figures(gathered(rows[0]))

    def sent(self) -> dict[str, Any]:
        if self.sync is not None:
            return dict(self.sync.metrics())
        dense = self.tally.dense_bytes
        done = self.step - self.tally.resumed
        return {
            "steps": done, "bytes_dense": done * dense, "skipped_steps": 0,
            **self._baseline.sent(done),
        }  # fmt: skip

    def save(self, out: Path) -> None:
        shared = {
            "step": self.step, "run": asdict(self.run), "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict(),
            "plateau": asdict(self.plateau),
        }  # fmt: skip
        own = {
            "random": self._random(), "tally": self.tally.state(self.sent()),
            "sync": self.sync.state_dict() if self.sync is not None else {},
        }  # fmt: skip
        saved.save(out, self.step, self.place.rank, shared, own)

    def load(self, out: Path) -> None:
        """On all ranks. What is read is looked at on all before any goes on."""
        shared, own = saved.resume(out, self.place.rank, self.place.world)
        agreed(lambda: _of_this_run(out, lambda: self._apply(shared, own)))
        if self.sync is not None:
            sync = self.sync
            agreed(lambda: _of_this_run(out, lambda: sync.load_state_dict(own["sync"])))

    def _apply(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        self.step = int(shared["step"])
        self.net.load_state_dict(shared["model"])
        self.optimizer.load_state_dict(shared["optimizer"])
        self.scaler.load_state_dict(shared["scaler"])
        self.plateau = Plateau(**shared.get("plateau", {}))
        self.tally.load(own["tally"], self.step)
        torch.set_rng_state(own["random"][0])
        if self.place.device.type == "cuda":
            torch.cuda.set_rng_state(own["random"][1], self.place.device)

    def _random(self) -> list[Tensor]:
        """What dropout will draw from."""
        device = self.place.device
        on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device]


def train(
    place: Place,
    run: Run,
    *,
    out: Path | None = None,
    resume: bool = False,
    tell: Tell = lambda record: None,
    asked_to_stop: Callable[[], bool] = lambda: False,
    wrap: Wrap = lambda recipe: recipe,
    after: Callable[[nn.Module], None] = lambda net: None,
) -> Outcome:
    """Train as the run says; `tell` hears of every step and score on all ranks alike.

    What `wrap` makes of the recipe is attached; `after` is given the trained network.
    """
    task = same_data(run, place.world)
    training = Training(run, place, task, wrap)
    if resume and out is not None:
        training.load(out)
        if training.step > training.total:
            raise Refused(
                f"{out} has taken {training.step} steps, more than the {training.total} asked for; "
                "give another --out"
            )
    figures = _steps(training, out, tell, asked_to_stop)
    finished = training.step >= training.total
    outcome = training.tally.outcome(training.sent())
    training.tally.close()
    if training.sync is not None:
        training.sync.detach()
    after(training.net)
    return Outcome(
        recipe=run.recipe, figures=figures, steps=training.step, finished=finished, **outcome
    )


def _of_this_run(out: Path, work: Callable[[], None]) -> None:
    try:
        work()
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise Refused(f"the checkpoint in {out} is not of this run ({first})") from None


def _steps(
    training: Training, out: Path | None, tell: Tell, asked_to_stop: Callable[[], bool]
) -> dict[str, float]:
    """All that are left. What one rank is refused on the way ends all after the same step."""
    settings, tally = training.run.settings, training.tally
    score_every = settings.of_epochs(settings.score_every, training.each)
    save_every = settings.of_epochs(settings.save_every, training.each)
    figures: dict[str, float] = {}
    scored, saved_at = -1, training.step  # what was just loaded need not be saved
    stream = parts(training.task.train, settings, training.place, training.step)
    ahead = Ahead(stream, training.total - training.step, tell)
    if training.step and score_every and training.step % score_every == 0:
        # what was loaded was saved before its score, in which the run may have ended
        figures, scored = training.score(), training.step
        ahead.tell([{**_counts(training), "elapsed": tally.seconds, **figures}])
    while training.step < training.total and not tally.stopping:
        tally.begin()
        loss = training.take(ahead.next())
        ahead.tell(tally.end(loss, asked_to_stop() or ahead.refused, _counts(training)))
        score = score_every and training.step % score_every == 0
        save = out is not None and save_every and training.step % save_every == 0
        if score or save:
            ahead.tell(tally.flush())
        if save and out is not None:  # before the score, which may be refused
            training.save(out)
            saved_at = training.step
        if score:
            figures, scored = training.score(), training.step
            ahead.tell([{**_counts(training), "elapsed": tally.seconds, **figures}])
    ahead.tell(tally.flush())
    if out is not None and saved_at != training.step:
        training.save(out)
    if training.step >= training.total and scored != training.step:
        figures = training.score()
        ahead.tell([{**_counts(training), "elapsed": tally.seconds, **figures}])
    agreed(ahead.complain)
    return figures


def _counts(training: Training) -> dict[str, Any]:
    """Where the training stands."""
    done = training.tally.whole(training.sent())
    return {
        "step": training.step, "total": training.total, "density": done["density"],
        "bytes_sent": done["bytes_sent"],
    }  # fmt: skip
