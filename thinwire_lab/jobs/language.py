"""Jobs that guess what comes next in a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
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

# size: words, width, layers, length, dropout
PTB = {"tiny": (500, 64, 1, 20, 0.0), "small": (10_000, 256, 1, 35, 0.2),
       "paper": (10_000, 1500, 2, 35, 0.65)}  # fmt: skip
WIKITEXT = PTB | {"paper": (33_278, 500, 2, 70, 0.2)}
# size: words, width, layers, heads, length
GPT2 = {"tiny": (600, 64, 2, 2, 32), "small": (4000, 256, 4, 4, 64),
        "paper": (50_257, 768, 12, 12, 1024)}  # fmt: skip
GPT2_LARGE = GPT2 | {"paper": (50_257, 1280, 36, 20, 1024)}


def lstm(shapes: Mapping[str, tuple[int, int, int, int, float]], size: str, source: Source) -> Task:
    words, width, layers, longest, drop = shapes[size]
    length = source.words(longest)
    if source.fake:
        data: Any = fake((((length,), words), ((length,), words)))
    else:
        split = text.signs if source.data is None else text.split_at_spaces
        most = words if size != "paper" else WORDS
        streams, words = text.words(_parts(size, source), most, split)
        data = [text.Windows(stream, length) for stream in streams]
    return _predict_next_word(lambda: recurrent.WordLstm(words, width, layers, drop), data)


def gpt2(shapes: Mapping[str, tuple[int, int, int, int, int]], size: str, source: Source) -> Task:
    words, width, layers, heads, places = shapes[size]
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
    folder = source.folder(size, TEXT)
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
        sums = [[float(total(model, batch, "sum")), batch[1].numel()] for batch in batches]
        return torch.tensor(sums, dtype=torch.float64).view(-1, 2)

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
_GPT2_SIZES = {"tiny": TINY, "small": replace(SMALL, rate=2e-3), "paper": _CAUSAL}

JOBS = {
    "lstm-lm": Job(
        about="LSTM language model, PTB (gTop-k)",
        embedded=text.EMBEDDED, reads=True, make=partial(lstm, PTB),
        sizes={"tiny": _TINY_LSTM, "small": _SMALL_LSTM, "paper": _WORDS},
    ),
    "lstm-wiki": Job(
        about="LSTM language model, WikiText-2 (ADTopk)",
        embedded=text.EMBEDDED, reads=True, make=partial(lstm, WIKITEXT),
        sizes={"tiny": _TINY_LSTM, "small": _SMALL_LSTM, "paper": _WIKI},
    ),
    "gpt2": Job(
        about="GPT-2, WikiText-103 (ADTopk)", embedded=text.EMBEDDED, reads=True,
        make=partial(gpt2, GPT2), sizes=_GPT2_SIZES,
    ),
    "gpt2-large": Job(
        about="the same, GPT-2 large", embedded=text.EMBEDDED, reads=True,
        make=partial(gpt2, GPT2_LARGE), sizes=_GPT2_SIZES,
    ),
}  # fmt: skip
