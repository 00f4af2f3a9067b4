"""Networks that read one step after another: for words, and for speech."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class WordLstm(nn.Module):
    """An LSTM that predicts the next word; 2 x 1500 on PTB's 10,000 words: 66,034,000 parameters.

    Zaremba et al. 2014 (arXiv 1409.2329), as gTop-k (arXiv 1901.04359) trained it.
    """

    def __init__(self, words: int, width: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.embed = nn.Embedding(words, width)
        self.lstm = nn.LSTM(
            width, width, layers, dropout=dropout if layers > 1 else 0.0, batch_first=True
        )
        self.out = nn.Linear(width, words)
        nn.init.uniform_(self.embed.weight, -0.05, 0.05)
        nn.init.uniform_(self.out.weight, -0.05, 0.05)

    def forward(self, ids: Tensor) -> Tensor:  # (n, length) -> (n, length, words)
        read, _ = self.lstm(self.drop(self.embed(ids)))
        scores: Tensor = self.out(self.drop(read))
        return scores


class SpeechLstm(nn.Module):
    """Two convolutions, LSTMs one way, a look ahead, and letters: 27,569,568 parameters.

    Deep Speech 2 (arXiv 1512.02595), as Ok-Topk (arXiv 2201.07598) trained it on AN4.
    """

    def __init__(
        self, width: int = 800, layers: int = 5, channels: int = 32, letters: int = 29
    ) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, channels, (41, 11), stride=(2, 2), padding=(20, 5)),
            nn.BatchNorm2d(channels), nn.Hardtanh(0, 20),
            nn.Conv2d(channels, channels, (21, 11), stride=(2, 1), padding=(10, 5)),
            nn.BatchNorm2d(channels), nn.Hardtanh(0, 20),
        )  # fmt: skip
        inputs = 41 * channels
        self.lstms = nn.ModuleList(
            nn.LSTM(inputs if i == 0 else width, width, batch_first=True) for i in range(layers)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(layers))  # last: before out
        self.ahead = nn.Conv1d(width, width, 21, groups=width, bias=False)
        self.out = nn.Linear(width, letters, bias=False)

    def forward(self, sounds: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of letters, (n, steps, letters), and how many steps each recording has."""
        steps = (frames + 1) // 2
        x = sounds
        for layer in self.conv:  # silence behind a recording's end stays silent
            x = layer(x)
            x = x * _mask_padding(x.shape[3], steps if x.shape[3] < sounds.shape[3] else frames)
        x = x.flatten(1, 2).transpose(1, 2)  # (n, steps, features)
        for number, lstm in enumerate(self.lstms):
            if number > 0:
                x = _normalise(self.norms[number - 1], x)
            x, _ = lstm(x)
        x = x * _mask_padding(x.shape[1], steps)[:, 0, 0, :, None]
        later = nn.functional.pad(x.transpose(1, 2), (0, 20))
        x = nn.functional.hardtanh(self.ahead(later), 0, 20).transpose(1, 2)
        return self.out(_normalise(self.norms[-1], x)), steps


def _mask_padding(length: int, counts: Tensor) -> Tensor:  # (n,) -> (n, 1, 1, length)
    """1 where a recording still is, 0 behind its end."""
    return (torch.arange(length, device=counts.device) < counts[:, None]).float()[:, None, None]


def _normalise(norm: nn.Module, x: Tensor) -> Tensor:
    scaled: Tensor = norm(x.flatten(0, 1))
    return scaled.view(x.shape)


def ctc_loss(scores: Tensor, steps: Tensor, letters: Tensor, lengths: Tensor) -> Tensor:
    """Connectionist temporal classification: the letters in their order, wherever they are.

    Of a whole recording, as Ok-Topk's rate and clipping are meant; torch would divide by length.
    """
    likely = scores.log_softmax(dim=2).transpose(0, 1)
    total = torch.nn.functional.ctc_loss(
        likely, letters, steps, lengths, reduction="sum", zero_infinity=True
    )
    return total / len(lengths)
