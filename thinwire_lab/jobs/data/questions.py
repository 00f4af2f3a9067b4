"""Questions with answers in a text: SQuAD v1.1, and questions about Python's own library.

A long text is cut into overlapping windows; each is an example whose answer is a span of tokens, or
the first token if the answer is not in it. Rajpurkar et al. 2016 (arXiv 1606.05250).
"""

from __future__ import annotations

import collections
import json
import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire_lab.jobs.data.source import Batch, MissingData, read_bytes
from thinwire_lab.jobs.data.text import END, FIRST, PAD

LAYOUT = "train-v1.1.json and dev-v1.1.json, as published"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, the text it is about, and its answers: where they begin, and what they say."""

    text: str
    context: str
    answers: tuple[tuple[int, str], ...]


def squad(folder: Path) -> tuple[list[Question], list[Question]]:
    parts = []
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        path = folder / name
        if not path.is_file():
            raise MissingData(f"{folder} has no {name}; expected {LAYOUT}")
        try:
            parts.append(_read(json.loads(read_bytes(path))))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise MissingData(f"{path} is not SQuAD v1.1 ({error!r}); get it anew") from None
    if not all(parts):
        raise MissingData(f"{folder} holds no questions; get it anew")
    return parts[0], parts[1]


def _read(tree: Any) -> list[Question]:
    return [
        Question(
            text=_words(qa["question"]),
            context=_words(paragraph["context"]),
            answers=tuple(_locate_answer(paragraph["context"], a) for a in qa["answers"]),
        )
        for article in tree["data"]
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
    ]


def _words(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(f"{str(found)[:40]!r} is no text")
    return found


def _locate_answer(context: str, answer: Any) -> tuple[int, str]:
    """Where an answer begins, and what it says, if the text is long enough for it."""
    begin, said = int(answer["answer_start"]), str(answer["text"])
    if not 0 <= begin <= len(context) - len(said):
        raise ValueError(f"{said[:40]!r} at {begin} is not in its text of {len(context)} letters")
    return begin, said


def about(text: str, most: int) -> list[Question]:
    """Made-up questions: which word comes after a word that comes once in a line."""
    questions = []
    for line in text.splitlines():
        words = list(re.finditer(r"\w+", line))
        said = [w[0].lower() for w in words]
        for before, after in pairwise(words[2:]):
            if said.count(before[0].lower()) == 1:
                answer = ((after.start(), after[0]),)
                asked = f"what comes after {before[0]}"
                questions.append(Question(text=asked, context=line, answers=answer))
                break
    step = max(1, len(questions) // most)
    return questions[::step][:most]


@dataclass(frozen=True, kw_only=True)
class Window:
    """What the model sees of one question, and where its tokens stand in the text."""

    question: int
    ids: Tensor
    kinds: Tensor
    spans: tuple[tuple[int, int], ...]  # of tokens of the text; (-1, -1) for all others
    start: int
    end: int


@dataclass(frozen=True)
class Questions:
    """Windows of questions, as many tokens each as the model reads."""

    asked: Sequence[Question]
    windows: Sequence[Window]

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, chosen: Tensor, draw: torch.Generator | None) -> Batch:
        windows = [self.windows[i] for i in chosen.tolist()]
        ids, kinds = (torch.stack([getattr(w, n) for w in windows]) for n in ("ids", "kinds"))
        starts, ends = (torch.tensor([getattr(w, n) for w in windows]) for n in ("start", "end"))
        return ids, kinds, (ids != 0).long(), starts, ends, chosen


def windows(asked: Sequence[Question], tokenizer: Any, length: int, stride: int) -> Questions:
    """Every question with every stretch of its text that fits behind it."""
    marks = {mark: tokenizer.token_to_id(mark) for mark in (FIRST, END, PAD)}
    if marks[PAD] != 0:
        raise MissingData(f"the vocabulary has {PAD} at {marks[PAD]}, expected 0")
    made: list[Window] = []
    for number, question in enumerate(asked):
        ask = tokenizer.encode(question.text, add_special_tokens=False).ids[: length // 4]
        text = tokenizer.encode(question.context, add_special_tokens=False)
        room = length - len(ask) - 3
        for first in range(0, max(1, len(text.ids) - room + stride), stride):
            part = text.ids[first : first + room]
            spans = text.offsets[first : first + room]
            made.append(_window(number, question, ask, part, spans, length, marks))
            if first + room >= len(text.ids):
                break
    return Questions(asked, made)


def _window(
    number: int, question: Question, ask: list[int], part: list[int],
    spans: list[tuple[int, int]], length: int, marks: dict[str, int],
) -> Window:  # fmt: skip
    head = len(ask) + 2
    ids = torch.zeros(length, dtype=torch.int64)
    whole = [marks[FIRST], *ask, marks[END], *part, marks[END]]
    ids[: len(whole)] = torch.tensor(whole)
    kinds = torch.zeros(length, dtype=torch.int64)
    kinds[head : len(whole)] = 1
    start = end = 0
    if question.answers:
        begin, said = question.answers[0]
        stop = begin + len(said)
        inside = [i for i, (a, b) in enumerate(spans) if a < stop and b > begin]
        if inside and spans[0][0] <= begin and spans[-1][1] >= stop:
            start, end = head + inside[0], head + inside[-1]
    every = [(-1, -1)] * head + list(spans) + [(-1, -1)] * (length - head - len(spans))
    return Window(question=number, ids=ids, kinds=kinds, spans=tuple(every), start=start, end=end)


def best_span(
    starts: Tensor, ends: Tensor, spans: Sequence[tuple[int, int]], longest: int = 30
) -> tuple[float, int, int]:
    """The likeliest span of up to `longest` tokens: its score, and where it begins and ends."""
    inside = torch.tensor([a >= 0 for a, _ in spans])
    pair = starts.float().cpu()[:, None] + ends.float().cpu()[None, :]
    near = torch.ones_like(pair).triu().tril(longest - 1) > 0
    pair = pair.masked_fill(~(near & inside[:, None] & inside[None, :]), -torch.inf)
    place = int(pair.argmax())
    a, b = divmod(place, len(spans))
    return float(pair.view(-1)[place]), spans[a][0], spans[b][1]


def normalise(answer: str) -> str:
    """Without capitals, punctuation, articles and double spaces, as the official script has it."""
    plain = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def exact_match(said: str, answers: Iterable[str]) -> float:
    return float(any(normalise(said) == normalise(answer) for answer in answers))


def f1(said: str, answers: Iterable[str]) -> float:
    """The best overlap of words with any of the answers."""
    return max(
        (_overlap(normalise(said).split(), normalise(a).split()) for a in answers), default=0.0
    )


def _overlap(said: list[str], answer: list[str]) -> float:
    common = sum((collections.Counter(said) & collections.Counter(answer)).values())
    if common == 0:
        return 0.0
    return 2 * common / (len(said) + len(answer))
