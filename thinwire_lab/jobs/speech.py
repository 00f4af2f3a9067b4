"""The job that writes down what was said."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from thinwire_lab.jobs.data import speech
from thinwire_lab.jobs.data.fake import fake
from thinwire_lab.jobs.data.source import Batch
from thinwire_lab.jobs.job import Job, Settings, Source, Task, quick
from thinwire_lab.jobs.networks import recurrent


def lstm_an4(size: str, source: Source) -> Task:
    shapes = {"tiny": (64, 2, 4), "small": (256, 3, 16), "paper": (800, 5, 32)}
    width, layers, channels = shapes[size]
    if source.fake:
        data: Any = fake((((1, 161, 200), 0), ((), 1), ((20,), 29), ((), 20)), rows=8)
        loss = _fake_speech_loss
    else:
        folder = source.folder(size, speech.LAYOUT)
        data = speech.tones() if folder is None else speech.an4(folder)
        loss = _speech_loss
    return Task(
        net=lambda: recurrent.SpeechLstm(width, layers, channels), train=data[0], test=data[1],
        loss=loss, rows=_score_transcripts, figures=_error_rates,
    )  # fmt: skip


def _speech_loss(net: nn.Module, batch: Batch) -> Tensor:
    sounds, frames, letters, lengths = batch
    scores, steps = net(sounds, frames)
    return recurrent.ctc_loss(scores, steps, letters, lengths)


def _fake_speech_loss(net: nn.Module, batch: Batch) -> Tensor:
    """Random sounds all have their full length."""
    sounds, frames, letters, _ = batch
    whole, lengths = torch.full_like(frames, sounds.shape[3]), torch.full_like(frames, 5)
    return _speech_loss(net, (sounds, whole, letters, lengths))


def _score_transcripts(net: nn.Module, batches: Iterable[Batch]) -> Tensor:
    rows = []
    for sounds, frames, letters, lengths in batches:
        scores, steps = net(sounds, frames)
        for one, count, spelt, length in zip(scores, steps, letters, lengths, strict=True):
            said = speech.greedy(one[: int(count)])
            right = "".join(speech.ALPHABET[i] for i in spelt[: int(length)].tolist())
            rows.append([
                speech.edits(said.split(), right.split()), len(right.split()),
                speech.edits(said, right), len(right),
            ])  # fmt: skip
    return torch.tensor(rows, dtype=torch.float64).view(-1, 4)


def _error_rates(rows: Tensor) -> dict[str, float]:
    words, of_words, letters, of_letters = rows.sum(dim=0).tolist()
    return {"wer": words / max(of_words, 1), "cer": letters / max(of_letters, 1)}


_AN4 = Settings(batch=2, rate=1e-3, epochs=100, weight_decay=1e-4, clip=400.0,
                schedule="milestones", milestones=tuple(range(1, 100)), gamma=1 / 1.01)  # fmt: skip

JOBS = {
    "lstm-an4": Job(
        about="LSTM speech with CTC, AN4 (Ok-Topk)", embedded="words spelt in tones", make=lstm_an4,
        sizes={"tiny": quick(8, 3e-3, 24, optimizer="adam"),
               "small": Settings(batch=8, rate=1e-3, epochs=20, optimizer="adam", clip=100.0),
               "paper": _AN4},
    ),
}  # fmt: skip
