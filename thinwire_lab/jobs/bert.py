"""BERT's jobs: what was masked and whether sentences follow; and where the answer is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire_lab.jobs.data import questions, text
from thinwire_lab.jobs.data.fake import fake
from thinwire_lab.jobs.data.source import Batch
from thinwire_lab.jobs.job import Job, Settings, Source, Task
from thinwire_lab.jobs.language import LIBRARY, SMALL, TINY, texts
from thinwire_lab.jobs.networks import hub

Shapes = Mapping[str, tuple[int, int, int, int]]  # size: words, width, layers, heads
BASE = {"tiny": (600, 64, 2, 2), "small": (4000, 256, 4, 4), "paper": (30_522, 768, 12, 12)}
LARGE = BASE | {"paper": (30_522, 1024, 24, 16)}


def pretrain(shapes: Shapes, size: str, source: Source) -> Task:
    words, width, layers, heads = shapes[size]
    length = source.words({"tiny": 32, "small": 64, "paper": 128}[size])
    if source.fake:
        data: Any = fake((((length,), words), ((length,), 2), ((length,), 2),
                          ((length,), words), ((), 2)), rows=16)  # fmt: skip
    else:
        train, test = texts(size, source)
        learnt = text.word_pieces(train, words, source.checkpoint)
        data = tuple(text.sentences(learnt, part, length) for part in (train, test))
        words = learnt.get_vocab_size()
    return Task(
        net=lambda: _net("pretraining", (width, layers, heads, words), length, source),
        train=data[0], test=data[1], loss=lambda net, batch: _bert(net, batch).loss,
        rows=_bert_rows, figures=_bert_figures,
    )  # fmt: skip


def answer_questions(shapes: Shapes, size: str, source: Source) -> Task:
    words, width, layers, heads = shapes[size]
    longest, stride = {"tiny": (40, 16), "small": (128, 64), "paper": (384, 128)}[size]
    length = source.words(longest)
    stride = max(1, stride * length // longest)
    if source.fake:
        data: Any = fake((((length,), words), ((length,), 2), ((length,), 2), ((), length),
                          ((), length), ((), 1)), rows=16)  # fmt: skip
        asked: Any = None
    else:
        folder = source.folder(size, questions.LAYOUT)
        if folder is None:
            most = 600 if size == "tiny" else 4000
            asked = [questions.about(part, most) for part in text.library(LIBRARY[size])]
        else:
            asked = questions.squad(folder)
        corpus = "\n".join(f"{q.text}\n{q.context}" for q in asked[0])
        learnt = text.word_pieces(corpus, words, source.checkpoint)
        data = tuple(questions.windows(part, learnt, length, stride) for part in asked)
        words = learnt.get_vocab_size()
    return Task(
        net=lambda: _net("questions", (width, layers, heads, words), length, source),
        train=data[0], test=data[1], loss=_answer_loss,
        rows=lambda net, batches: _answers(net, batches, data[1]), figures=_answer_figures,
    )  # fmt: skip


def _net(task: str, shape: tuple[int, int, int, int], length: int, source: Source) -> nn.Module:
    made = hub.bert(*shape, task=task, checkpoint=source.checkpoint)
    return hub.check_reader(made, shape[3], length)


def _bert(net: nn.Module, batch: Batch) -> Any:
    ids, kinds, there, labels, follows = batch
    return net(
        input_ids=ids, token_type_ids=kinds, attention_mask=there, labels=labels,
        next_sentence_label=follows,
    )  # fmt: skip


def _bert_rows(net: nn.Module, batches: Iterable[Batch]) -> Tensor:
    rows = []
    for batch in batches:
        out, labels, follows = _bert(net, batch), batch[3], batch[4]
        words, next_ = out.prediction_logits, out.seq_relationship_logits
        rows.append([
            float(F.cross_entropy(words.flatten(0, 1), labels.flatten(), reduction="sum")),
            float((words.argmax(dim=2) == labels).sum()), float((labels >= 0).sum()),
            float(F.cross_entropy(next_, follows, reduction="sum")),
            float((next_.argmax(dim=1) == follows).sum()), len(follows),
        ])  # fmt: skip
    return torch.tensor(rows, dtype=torch.float64).view(-1, 6)


def _bert_figures(rows: Tensor) -> dict[str, float]:
    """Both losses by their own counts, so that the figure does not hang on the batch."""
    guessing, hit, masked, following, right, pairs = rows.sum(dim=0).tolist()
    masked, pairs = max(masked, 1), max(pairs, 1)
    return {
        "test_loss": guessing / masked + following / pairs,
        "masked_accuracy": hit / masked,
        "next_accuracy": right / pairs,
    }


def _run_net(net: nn.Module, batch: Batch) -> Any:
    return net(input_ids=batch[0], token_type_ids=batch[1], attention_mask=batch[2])


def _answer_loss(net: nn.Module, batch: Batch) -> Tensor:
    out = _run_net(net, batch)
    return (
        F.cross_entropy(out.start_logits, batch[3]) + F.cross_entropy(out.end_logits, batch[4])
    ) / 2


def _answers(net: nn.Module, batches: Iterable[Batch], data: Any) -> Tensor:
    """A row a window: the question, how sure the model is, exact match, F1."""
    rows = []
    for batch in batches:
        out = _run_net(net, batch)
        for place, starts, ends in zip(
            batch[5].tolist(), out.start_logits, out.end_logits, strict=True
        ):
            if not isinstance(data, questions.Questions):
                continue  # fake data has no answers
            window = data.windows[place]
            question = data.asked[window.question]
            sure, begin, end = questions.best_span(starts, ends, window.spans)
            said, right = question.context[begin:end], [a for _, a in question.answers]
            rows.append([
                window.question, sure, questions.exact_match(said, right), questions.f1(said, right)
            ])  # fmt: skip
    return torch.tensor(rows, dtype=torch.float64).view(-1, 4)


def _answer_figures(rows: Tensor) -> dict[str, float]:
    best: dict[int, tuple[float, float, float]] = {}
    for number, *rest in rows.tolist():
        best[int(number)] = max(best.get(int(number), (-math.inf, 0.0, 0.0)), tuple(rest))
    count = max(len(best), 1)
    return {
        "f1": sum(b[2] for b in best.values()) / count,
        "exact_match": sum(b[1] for b in best.values()) / count,
    }


# of these steps Ok-Topk's scripts take the first 256 to 1024
_PRETRAINING = Settings(batch=8, rate=2e-4, steps=286_720, warmup_steps=28_672, optimizer="adamw",
                        epsilon=1e-6, weight_decay=0.01, schedule="linear", clip=1.0)  # fmt: skip
_ANSWERING = Settings(batch=4, rate=3e-5, epochs=3, warmup=0.3, optimizer="adamw", epsilon=1e-6,
                      weight_decay=0.01, schedule="linear", clip=1.0)  # fmt: skip

JOBS = {
    "bert": Job(
        about="BERT pretraining from plain text (Ok-Topk)",
        embedded=text.EMBEDDED, reads=True, make=partial(pretrain, BASE),
        sizes={"tiny": TINY, "small": SMALL, "paper": _PRETRAINING},
    ),
    "bert-large": Job(
        about="the same, BERT-large (ACP-SGD)",
        embedded=text.EMBEDDED, reads=True, make=partial(pretrain, LARGE),
        sizes={"tiny": TINY, "small": SMALL, "paper": _PRETRAINING},
    ),
    "squad": Job(
        about="BERT on SQuAD v1.1 (ADTopk)", embedded=f"questions on {text.EMBEDDED}", reads=True,
        make=partial(answer_questions, BASE),
        sizes={"tiny": TINY, "small": SMALL, "paper": _ANSWERING},
    ),
    "squad-large": Job(
        about="the same, BERT-large (ADTopk)", embedded=f"questions on {text.EMBEDDED}", reads=True,
        make=partial(answer_questions, LARGE),
        sizes={"tiny": TINY, "small": SMALL, "paper": replace(_ANSWERING, epochs=30, warmup=3)},
    ),
}  # fmt: skip
