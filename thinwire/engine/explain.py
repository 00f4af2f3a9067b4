"""What a recipe became for this training, and what recorded trainings say it costs."""

from __future__ import annotations

from torch.optim import Optimizer

from thinwire import evidence, recipes
from thinwire.describe import describe
from thinwire.evidence import Trial
from thinwire.protocols import Reducer
from thinwire.recipes.tuned import CODES, Tuned

NEAR = 0.95  # a budget is met to 5 %


def explain(asked: Reducer, became: Reducer, optimizer: Optimizer | None) -> str:
    """Lines for people: the recipe, what it was completed to, and the evidence for it."""
    lines = [repr(asked)]
    if became is not asked:
        lines.append(f"  is {became!r}")
    found = supporting(asked, family(optimizer))
    lines += [f"  recorded: {_shown(trial)}" for trial in found]
    if not found:
        lines.append(f"  {_unknown(asked, family(optimizer))}")
    return "\n".join(lines)


def supporting(asked: Reducer, optimizer: str | None) -> list[Trial]:
    """The recorded trainings that speak for this recipe.

    Of a tuned one those that saved at least as much, and as little more as there are.
    """
    if not isinstance(asked, Tuned):
        return _recorded(asked, optimizer)
    tuned = [trial for trial in _tuned(asked, optimizer) if trial.saving >= NEAR * asked.saving]
    nearest = min((trial.saving for trial in tuned), default=0.0)
    return [trial for trial in tuned if trial.saving <= nearest / NEAR]


def family(optimizer: Optimizer | None) -> str | None:
    """The name that evidence knows an optimizer by; of an unknown one, none."""
    if optimizer is None:
        return None
    adam = any("betas" in group for group in optimizer.param_groups)
    return "adam" if adam else "sgd"


def _recorded(asked: Reducer, optimizer: str | None) -> list[Trial]:
    """The trials of this very recipe, however its call was written, for any length."""
    codes = [code for _, code in CODES if describe(code()) == describe(asked)]  # tuned to 2, 4, 8
    calls = {repr(asked), *(repr(code()) for code in codes)}
    same = [t.recipe for t in evidence.trials() if repr(recipes.parse(t.recipe)) in calls]
    found = [evidence.find(call, optimizer) for call in sorted({*calls, *same})]
    return list(dict.fromkeys(trial for trials in found for trial in trials))


def _tuned(asked: Tuned, optimizer: str | None) -> list[Trial]:
    return [
        trial
        for trial in evidence.trials()
        if trial.recipe.startswith("tuned(")
        and optimizer == evidence.family(trial.optimizer)
        and (optimizer == "adam" or asked.clipped == trial.clipped)
    ]


def _unknown(asked: Reducer, optimizer: str | None) -> str:
    if not isinstance(asked, Tuned):
        return "no recorded training of this recipe with this optimizer"
    most = max((trial.saving for trial in _tuned(asked, optimizer)), default=0.0)
    return f"beyond the evidence: no recorded training like this saved {asked.saving:g} times" + (
        f"; the most is {most:.0f}" if most else ""
    )


def _shown(trial: Trial) -> str:
    seeds = "1 seed" if trial.seeds == 1 else f"{trial.seeds} seeds"
    unit = "points" if trial.job in ACCURACIES else "% perplexity"
    cost = f"{abs(trial.cost):.1f} {unit} {'worse' if trial.cost > 0 else 'better'} than dense"
    return (
        f"{trial.job}, {trial.optimizer}, {trial.steps} steps, {seeds}: {cost}, "
        f"{trial.saving:.1f} times fewer bytes"
    )


ACCURACIES = ("resnet20", "vgg16")  # jobs whose figure is an accuracy; the others' is a perplexity
