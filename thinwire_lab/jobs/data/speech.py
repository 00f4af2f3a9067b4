"""Speech: recordings with transcripts as AN4 has them, and tones that spell words.

    train/**/*.wav, train/**/*.txt   one transcript a recording, of the same name
    test/**/*.wav,  test/**/*.txt

Recordings become magnitudes of frequencies, 20 ms at a time, 10 ms apart, as DeepSpeech has them.
"""

from __future__ import annotations

import math
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinwire_lab.jobs.data.source import Batch, MissingData, read_bytes, refuse_damaged

ALPHABET = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "  # the first is CTC's blank
LAYOUT = "train/**/*.wav with train/**/*.txt of the same names, and test/ alike (16 kHz, mono)"
RATE = 16_000
WINDOW = 320  # samples: 20 ms
SPOKEN = ("ONE", "TWO", "SIX", "YES", "NO", "GO", "STOP", "ERASE", "RUBOUT", "ENTER", "HELP",
          "A B C")  # fmt: skip


@dataclass(frozen=True)
class Recordings:
    """Waves and what they say; a batch is padded to its longest."""

    waves: Sequence[Tensor | Path]
    said: Sequence[str]
    faster: float = 0.15  # training ones are played up to so much faster or slower

    def __len__(self) -> int:
        return len(self.said)

    def batch(self, chosen: Tensor, draw: torch.Generator | None) -> Batch:
        picked = chosen.tolist()
        sounds = [_spectrum(self._wave(i, draw)) for i in picked]  # (161, frames) each
        letters = [encode_text(self.said[i]) for i in picked]
        frames = torch.tensor([s.shape[1] for s in sounds])
        lengths = torch.tensor([len(w) for w in letters])
        padded = torch.zeros(len(sounds), 1, sounds[0].shape[0], int(frames.max()))
        for row, sound in enumerate(sounds):
            padded[row, 0, :, : sound.shape[1]] = sound
        return padded, frames, pad_sequence(letters, batch_first=True), lengths

    def _wave(self, index: int, draw: torch.Generator | None) -> Tensor:
        found = self.waves[index]
        sound = _read(found) if isinstance(found, Path) else found
        if draw is None:
            return sound
        gain, speed = torch.rand(2, generator=draw).tolist()  # louder or softer, faster or slower
        size = round(len(sound) / (1 + self.faster * (2 * speed - 1)))
        stretched = torch.nn.functional.interpolate(sound[None, None], size=size, mode="linear")
        return stretched[0, 0] * float(10 ** ((14 * gain - 6) / 20))


def an4(folder: Path) -> tuple[Recordings, Recordings]:
    parts = []
    for name in ("train", "test"):
        waves = sorted((folder / name).rglob("*.wav"))
        texts: dict[str, Path] = {}
        spoken = {path.stem for path in waves}
        for path in sorted((folder / name).rglob("*.txt")):
            if texts.setdefault(path.stem, path) != path and path.stem in spoken:
                raise MissingData(
                    f"{texts[path.stem]} and {path} have one name: a recording's transcript is "
                    "found by its name; rename one"
                )
        if not waves or any(path.stem not in texts for path in waves):
            what = "recording without its transcript" if waves else "no recordings"
            raise MissingData(f"{folder / name}: {what}; expected {LAYOUT}")
        parts.append(Recordings(waves, [_transcript(texts[path.stem]) for path in waves]))
    return parts[0], parts[1]


def _transcript(path: Path) -> str:
    try:
        said = read_bytes(path).decode().strip().upper()
    except UnicodeDecodeError as error:
        raise MissingData(f"{path} is no text ({error.reason}); get it anew") from None
    if not any("A" <= letter <= "Z" for letter in said):
        raise MissingData(f"{path} has no letters, {said[:40]!r}; expected what is said, in A to Z")
    return said


def tones(train: int = 192, test: int = 48) -> tuple[Recordings, Recordings]:
    """Words spelt in tones: a pitch a letter, 60 ms each, in a little noise."""
    draw = torch.Generator().manual_seed(0)
    parts = []
    for count in (train, test):
        said = [SPOKEN[int(i)] for i in torch.randint(len(SPOKEN), (count,), generator=draw)]
        parts.append(Recordings([_spell(word, draw) for word in said], said, 0.0))  # pitch is all
    return parts[0], parts[1]


def encode_text(text: str) -> Tensor:
    """Letters by number; what the alphabet lacks is left out."""
    numbers = [ALPHABET.index(c) for c in text.upper() if c in ALPHABET[1:]]
    return torch.tensor(numbers, dtype=torch.int64)


def greedy(scores: Tensor) -> str:  # (frames, letters)
    """The likeliest letter of every frame, repetitions and blanks dropped."""
    if len(scores) == 0:
        return ""
    best = scores.argmax(dim=1)
    kept = best[torch.cat([best.new_ones(1, dtype=torch.bool), best[1:] != best[:-1]])]
    return "".join(ALPHABET[i] for i in kept.tolist() if i)


def edits(said: Sequence[str], answer: Sequence[str]) -> int:
    """How many must be put in, taken out or changed: Levenshtein's distance."""
    row = list(range(len(answer) + 1))
    for i, mine in enumerate(said):
        before, row[0] = row[0], i + 1
        for j, theirs in enumerate(answer):
            cheapest = min(row[j + 1] + 1, row[j] + 1, before + (mine != theirs))
            before, row[j + 1] = row[j + 1], cheapest
    return row[-1]


def _spell(word: str, draw: torch.Generator) -> Tensor:
    time = torch.arange(int(0.06 * RATE)) / RATE
    parts = [torch.sin(2 * math.pi * (300 + 120 * ALPHABET.index(c)) * time) for c in word]
    sound = torch.cat(parts)
    return sound + 0.05 * torch.randn(len(sound), generator=draw)


def _read(path: Path) -> Tensor:
    damaged = refuse_damaged(f"{path} is no recording", OSError, EOFError, RuntimeError, wave.Error)
    with damaged, wave.open(str(path)) as file:
        form = (file.getframerate(), file.getnchannels(), file.getsampwidth())
        frames = file.getnframes()
        data = file.readframes(frames)
    if form != (RATE, 1, 2):
        raise MissingData(f"{path} has {form} (rate, channels, bytes); expected {(RATE, 1, 2)}")
    if not data or len(data) != 2 * frames:
        raise MissingData(f"{path} is cut off ({len(data)} bytes of {2 * frames}); get it anew")
    if frames < WINDOW:
        raise MissingData(f"{path} has {frames} samples; expected {WINDOW} or more, 20 ms")
    return torch.frombuffer(bytearray(data), dtype=torch.int16).float() / 32_768


def _spectrum(sound: Tensor) -> Tensor:  # (samples,) -> (161, frames)
    """Logarithms of magnitudes, standardised."""
    frames = torch.stft(
        sound, WINDOW, WINDOW // 2, window=torch.hamming_window(WINDOW), return_complex=True
    )
    size = torch.log1p(frames.abs())
    return (size - size.mean()) / size.std().clamp(min=1e-6)
