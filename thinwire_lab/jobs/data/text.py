"""Text: WikiText and PTB files, plain-text folders, and the source of Python's own library.

    Windows     stretches of tokens, for models that predict the next one
    Sentences   masked pairs of sentences, for BERT

Words are numbered by how often they come; sub-word vocabularies are learnt by `tokenizers`, or read
from a checkpoint that has one.
"""

from __future__ import annotations

import collections
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire_lab.jobs.data.source import (
    Batch,
    MissingData,
    load_library,
    read_bytes,
    refuse_damaged,
)

STANDARD = ("argparse.py", "ast.py", "datetime.py", "decimal.py", "inspect.py", "tarfile.py",
            "textwrap.py", "threading.py", "typing.py", "zipfile.py")  # fmt: skip
LAYOUT = (
    "train.txt, valid.txt and test.txt, or wiki.train.tokens and so on, or ptb.train.txt, or other "
    "texts, *.txt"
)
_NAMES = ("{}.txt", "wiki.{}.tokens", "wiki.{}.raw", "ptb.{}.txt")
AT_ONCE, LINES_AT_ONCE = 1 << 22, 10_000  # letters and lines that a tokenizer is given at a time
FEWEST_WORDS = 3  # of a sentence; headings and remains are none
_SENTENCE = re.compile(r"\n|(?<=[.!?])\s+")
UNKNOWN, MASK, PAD, FIRST, END = "<unk>", "[MASK]", "[PAD]", "[CLS]", "[SEP]"

EMBEDDED = "Python's own sources"


def library(limit: int) -> tuple[str, str]:
    """Source of the standard library, for training and for the test: the last tenth."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / name for name in STANDARD if (folder / name).is_file()]
    if not files:
        raise MissingData(f"{folder} has no Python sources; give --data a folder with {LAYOUT}")
    each = limit // len(files)
    texts = [path.read_text(encoding="utf-8")[:each] for path in files]
    cut = int(0.9 * each)
    return "\n".join(t[:cut] for t in texts), "\n".join(t[cut:] for t in texts)


def corpus(folder: Path) -> tuple[str, str]:
    """Training and test text of a folder; where it has no training text, its validation text.

    Of any other text, a file or a folder of them, the last tenth is for the test.
    """
    found = {part: _part(folder, part) for part in ("train", "valid", "test")}
    others = [folder] if folder.is_file() else sorted(folder.glob("*.txt"))
    if others and not any(found.values()):
        text = "\n".join(_read(path) for path in others)
        cut = text.rfind("\n", 0, int(0.9 * len(text))) + 1 or int(0.9 * len(text))
        return text[:cut], text[cut:]
    train = found["train"] or found["valid"]
    test = found["test"] if found["test"] not in (None, train) else found["valid"]
    if train is None or test is None or train == test:
        raise MissingData(f"{folder} has not two parts of a text; expected {LAYOUT}")
    return _read(train), _read(test)


def validation(folder: Path) -> str | None:
    """The validation text of a folder, where `corpus` has no other use for it."""
    train, test, valid = (_part(folder, part) for part in ("train", "test", "valid"))
    return _read(valid) if train and test and valid else None


def _part(folder: Path, part: str) -> Path | None:
    for name in _NAMES:
        if (folder / name.format(part)).is_file():
            return folder / name.format(part)
    return None


def _read(path: Path) -> str:
    with refuse_damaged(f"{path} is no UTF-8 text", UnicodeDecodeError):
        text = read_bytes(path).decode("utf-8")
    if not text.strip():
        raise MissingData(f"{path} is empty; get it anew")
    return text


def words(
    texts: Sequence[str], most: int, split: Callable[[str], list[str]]
) -> tuple[list[Tensor], int]:
    """Texts as numbers of words, and how many words the first has; rarer ones are the unknown word.

    `split` is `spaced` for text that is cut into words already, as PTB and WikiText are.
    """
    parts = [split(text) for text in texts]
    common = collections.Counter(parts[0])
    common.pop(UNKNOWN, None)
    order = sorted(common, key=lambda word: (-common[word], word))[: most - 1]
    number = {UNKNOWN: 0} | {word: i + 1 for i, word in enumerate(order)}
    return [torch.tensor([number.get(w, 0) for w in part]) for part in parts], len(number)


def signs(text: str) -> list[str]:
    """Words and signs of a program; the end of a line is a word too."""
    return re.findall(r"\w+|[^\w\s]|\n", text)


def split_at_spaces(text: str) -> list[str]:
    """What stands between spaces; the end of a line is a word too."""
    return text.replace("\n", " <eos> ").split()


def pieces(train: str, most: int, checkpoint: Path | None = None) -> Any:
    """A byte-level BPE: the checkpoint's, or one learnt from this text."""
    tokenizers = load_library("tokenizers")
    if checkpoint is not None:
        return _checkpoint_tokenizer(checkpoint)
    learnt = tokenizers.ByteLevelBPETokenizer()
    learnt.train_from_iterator(train.splitlines(), vocab_size=most, show_progress=False)
    return learnt


def word_pieces(train: str, most: int, checkpoint: Path | None = None) -> Any:
    """BERT's vocabulary: the checkpoint's, or one learnt from this text."""
    tokenizers = load_library("tokenizers")
    if checkpoint is not None:
        return _checkpoint_tokenizer(checkpoint)
    learnt = tokenizers.BertWordPieceTokenizer(lowercase=True)
    letters = sorted(set(learnt.normalizer.normalize_str(train)) - {" "})
    # pieces that are known beforehand are numbered as they stand here, others as chance has it,
    # and chance would also break ties: all ranks, and a resumed run, must find the same pieces
    first = [PAD, "[UNK]", FIRST, END, MASK, *(f"##{letter}" for letter in letters)]
    learnt.train_from_iterator(
        train.splitlines(), vocab_size=most, show_progress=False, special_tokens=first,
        limit_alphabet=len(letters),
    )  # fmt: skip
    rest = sorted(set(learnt.get_vocab()) - set(first))
    vocabulary = {piece: number for number, piece in enumerate([*first, *rest])}
    return tokenizers.BertWordPieceTokenizer(vocab=vocabulary, lowercase=True)


def _checkpoint_tokenizer(folder: Path) -> Any:
    tokenizers = load_library("tokenizers")

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise MissingData(f"{folder} has no tokenizer.json; expected one beside the checkpoint")
    with refuse_damaged(f"{path} is no tokenizer", Exception):  # it has no kind of its own
        found = tokenizers.Tokenizer.from_file(str(path))
    found.no_truncation()  # of its last use, saved with it
    found.no_padding()
    return found


def tokens(tokenizer: Any, text: str) -> Tensor:
    """The whole text, in stretches of lines: a tokenizer needs a hundred times as much memory."""
    parts = [torch.tensor(tokenizer.encode(part).ids, dtype=torch.int32)
             for part in _stretches(text)]  # fmt: skip
    return torch.cat(parts)


def _stretches(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = start + AT_ONCE
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


@dataclass(frozen=True)
class Windows:
    """Stretches of `length` tokens and, as the answer, each one's successor."""

    stream: Tensor
    length: int

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.length

    def batch(self, chosen: Tensor, draw: torch.Generator | None) -> Batch:
        at = chosen[:, None] * self.length + torch.arange(self.length)
        return self.stream[at].long(), self.stream[at + 1].long()


@dataclass(frozen=True)
class Sentences:
    """Pairs of sentences: half of them follow each other; one token in seven is to be guessed.

    The first of a pair has one that follows it in its paragraph; the other half is from anywhere.

    Of the tokens to be guessed eight in ten are masked, one is another token, one is itself.
    Devlin et al. 2019 (arXiv 1810.04805).
    """

    ids: Tensor  # tokens of all sentences, one after the other
    starts: Tensor  # where each begins, and the end
    firsts: Tensor  # sentences that another follows
    length: int
    vocabulary: int
    marks: dict[str, int]

    def __len__(self) -> int:
        return len(self.firsts)

    def batch(self, chosen: Tensor, draw: torch.Generator | None) -> Batch:
        chosen = self.firsts[chosen]
        draw = draw or torch.Generator().manual_seed(int(chosen[0]))  # the same test for everyone
        follows = torch.rand(len(chosen), generator=draw) < 0.5
        others = torch.randint(len(self.starts) - 1, (len(chosen),), generator=draw)
        second = torch.where(follows, chosen + 1, others)
        follows = second == chosen + 1
        ids = torch.full((len(chosen), self.length), self.marks[PAD])
        kinds = torch.zeros_like(ids)
        for row, (a, b) in enumerate(zip(chosen.tolist(), second.tolist(), strict=True)):
            self._fill(ids[row], kinds[row], self._line(a), self._line(b))
        masked, labels = self._mask(ids, draw)
        there = (ids != self.marks[PAD]).long()
        return masked, kinds, there, labels, (~follows).long()

    def _line(self, number: int) -> Tensor:
        return self.ids[self.starts[number] : self.starts[number + 1]].long()

    def _fill(self, ids: Tensor, kinds: Tensor, first: Tensor, second: Tensor) -> None:
        room = self.length - 3
        first = first[: room // 2]
        second = second[: room - len(first)]
        edge = torch.tensor([self.marks[END]])
        whole = torch.cat([torch.tensor([self.marks[FIRST]]), first, edge, second, edge])
        ids[: len(whole)] = whole
        kinds[len(first) + 2 : len(whole)] = 1

    def _mask(self, ids: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        special = torch.isin(ids, torch.tensor([self.marks[m] for m in (PAD, FIRST, END)]))
        chance = torch.rand(ids.shape, generator=draw).masked_fill(special, 2.0)
        guess = (chance < 0.15) | (chance == chance.min(dim=1, keepdim=True).values)  # at least one
        guess &= ~special
        how = torch.rand(ids.shape, generator=draw)
        other = torch.randint(self.vocabulary, ids.shape, generator=draw)
        masked = torch.where(guess & (how < 0.8), self.marks[MASK], ids)
        masked = torch.where(guess & (how >= 0.9), other, masked)
        return masked, torch.where(guess, ids, -100)


def sentences(tokenizer: Any, text: str, length: int) -> Sentences:
    """Sentences of a few words. They end with their line or with a full stop; an empty line ends a
    paragraph, or a document where every sentence has a line."""
    found: list[str] = []
    firsts: list[int] = []
    for paragraph in re.split(r"\n\s*\n", text):
        some = [s for s in _SENTENCE.split(paragraph) if len(s.split()) >= FEWEST_WORDS]
        firsts += range(len(found), len(found) + len(some) - 1)
        found += some
    marks = {mark: tokenizer.token_to_id(mark) for mark in (MASK, PAD, FIRST, END)}
    if not firsts or None in marks.values():
        raise MissingData(
            "the text has no paragraph of two sentences, or the vocabulary no [MASK] and [SEP]"
        )
    parts, sizes = [], [0]
    for first in range(0, len(found), LINES_AT_ONCE):
        some = found[first : first + LINES_AT_ONCE]
        for coded in tokenizer.encode_batch(some, add_special_tokens=False):
            parts.append(torch.tensor(coded.ids, dtype=torch.int32))
            sizes.append(len(coded.ids))
    starts, words = torch.tensor(sizes).cumsum(dim=0), tokenizer.get_vocab_size()
    return Sentences(torch.cat(parts), starts, torch.tensor(firsts), length, words, marks)
