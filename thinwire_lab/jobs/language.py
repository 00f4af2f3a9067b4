"""Jobs that guess what comes next in a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire_lab.jobs.data import text
from thinwire_lab.jobs.data.fake import fake
from thinwire_lab.jobs.data.source import Batch, Data
from thinwire_lab.jobs.job import Job, Settings, Source, Task, quick
from thinwire_lab.jobs.networks import hub, recurrent

LIBRARY = {"tiny": 120_000, "small": 400_000}  # characters of Python's own source
WORDS = 1 << 20  # at paper size all words of the text, be it PTB's 10,000 or WikiText-2's 33,278
TEXT = f"a folder with {text.LAYOUT}"


def lstm_lm(size: str, source: Source) -> Task:
    return _lstm(size, source, (10_000, 1500, 2, 35, 0.65))


def lstm_wiki(size: str, source: Source) -> Task:
    return _lstm(size, source, (33_278, 500, 2, 70, 0.2))


def _lstm(size: str, source: Source, paper: tuple[int, int, int, int, float]) -> Task:
    words, width, layers, length, drop = {
        "tiny": (500, 64, 1, 20, 0.0), "small": (10_000, 256, 1, 35, 0.2), "paper": paper,
    }[size]  # fmt: skip
    length = source.words(length)
    if source.fake:
        data: Any = fake((((length,), words), ((length,), words)))
    else:
        split = text.signs if source.data is None else text.split_at_spaces
        most = words if size != "paper" else WORDS
        streams, words = text.words(_parts(size, source), most, split)
        data = [text.Windows(stream, length) for stream in streams]
    return _predict_next_word(lambda: recurrent.WordLstm(words, width, layers, drop), data)


def gpt2(size: str, source: Source) -> Task:
    words, width, layers, heads, length = {
        "tiny": (600, 64, 2, 2, 32), "small": (4000, 256, 4, 4, 64),
        "paper": (50_257, 768, 12, 12, 1024),
    }[size]  # fmt: skip
    return _gpt2(words, width, layers, heads, length, size, source)


def gpt2_large(size: str, source: Source) -> Task:
    if size != "paper":
        return gpt2(size, source)
    return _gpt2(50_257, 1280, 36, 20, 1024, size, source)


def _gpt2(
    words: int, width: int, layers: int, heads: int, places: int, size: str, source: Source
) -> Task:
    length = source.words(places)
    if source.fake:
        data: Any = fake((((length,), words), ((length,), words)), rows=8)
    else:
        parts = _parts(size, source)
        learnt = text.pieces(parts[0], words, source.checkpoint)
        data = [text.Windows(text.tokens(learnt, part), length) for part in parts]
        words = learnt.get_vocab_size()

    def net() -> nn.Module:
        made = hub.gpt2(width, layers, heads, words, places, source.checkpoint)
        return hub.check_reader(made, words, length)

    return _predict_next_word(net, data)


def texts(size: str, source: Source) -> tuple[str, str]:
    folder = source.folder(size, f"a folder with {text.LAYOUT}")
    return text.library(LIBRARY[size]) if folder is None else text.corpus(folder)


def _parts(size: str, source: Source) -> list[str]:
    """To train on, to test with, and where there is one, what a plateau listens to."""
    both = texts(size, source)
    valid = None if source.data is None else text.validation(Path(source.data))
    return [*both] if valid is None else [*both, valid]


def _predict_next_word(net: Callable[[], nn.Module], data: Sequence[Data]) -> Task:
    """The next word; reported is the perplexity."""

    def total(model: nn.Module, batch: Batch, reduction: str) -> Tensor:
        out = model(batch[0])
        scores = out if isinstance(out, Tensor) else out.logits
        return F.cross_entropy(scores.flatten(0, 1), batch[1].flatten(), reduction=reduction)

    def rows(model: nn.Module, batches: Iterable[Batch]) -> Tensor:
        sums = [
            torch.tensor([float(total(model, batch, "sum")), batch[1].numel()]).double()
            for batch in batches
        ]
        return torch.stack(sums) if sums else torch.empty(0, 2, dtype=torch.float64)

    return Task(
        net=net, train=data[0], test=data[1], loss=lambda m, batch: total(m, batch, "mean"),
        rows=rows, figures=_perplexity, valid=data[2] if len(data) > 2 else None,
    )  # fmt: skip


def _perplexity(rows: Tensor) -> dict[str, float]:
    loss, words = rows.sum(dim=0).tolist()
    mean = loss / max(words, 1)
    return {"perplexity": math.exp(min(mean, 700.0)), "test_loss": mean}


_WORDS = Settings(batch=20, rate=1.0, epochs=50, momentum=0.0, clip=0.25, schedule="constant")
_WIKI = Settings(
    batch=80, rate=1e-3, rate_by_workers=True, epochs=120, optimizer="adam", weight_decay=1.2e-6,
    clip=0.1, schedule="plateau", gamma=0.5, patience=3,
)  # fmt: skip
_TINY_LSTM = quick(8, 1.0, 40, clip=0.5)
_SMALL_LSTM = Settings(batch=8, rate=1.0, epochs=4, clip=0.5)
_CAUSAL = Settings(batch=2, rate=5e-5, epochs=30, optimizer="adamw", schedule="linear")
SMALL = Settings(batch=8, rate=1e-3, epochs=4, warmup=0.4, optimizer="adamw", clip=1.0)
TINY = quick(8, 3e-3, 36, optimizer="adamw")

JOBS = {
    "lstm-lm": Job(
        about="LSTM language model, PTB (gTop-k)", data=TEXT,
        embedded=text.EMBEDDED, reads=True, make=lstm_lm,
        sizes={"tiny": _TINY_LSTM, "small": _SMALL_LSTM, "paper": _WORDS},
    ),
    "lstm-wiki": Job(
        about="LSTM language model, WikiText-2 (ADTopk)", data=TEXT,
        embedded=text.EMBEDDED, reads=True, make=lstm_wiki,
        sizes={"tiny": _TINY_LSTM, "small": _SMALL_LSTM, "paper": _WIKI},
    ),
    "gpt2": Job(
        about="GPT-2, WikiText-103 (ADTopk)", data=TEXT,
        embedded=text.EMBEDDED, reads=True, make=gpt2,
        sizes={"tiny": TINY, "small": replace(SMALL, rate=2e-3), "paper": _CAUSAL},
    ),
    "gpt2-large": Job(
        about="the same, GPT-2 large", data=TEXT,
        embedded=text.EMBEDDED, reads=True, make=gpt2_large,
        sizes={"tiny": TINY, "small": replace(SMALL, rate=2e-3), "paper": _CAUSAL},
    ),
}  # fmt: skip
