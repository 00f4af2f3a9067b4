"""Loaders read the standard files, and say what is wrong with others; nothing in a file can run."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import multiprocessing
import pickle
import signal
import subprocess
import sys
import tarfile
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire_lab.jobs.catalogue import find
from thinwire_lab.jobs.data import images, questions, speech, text
from thinwire_lab.jobs.data.source import (
    MissingData,
    Pick,
    Shards,
    batches,
    load_library,
    pick_in_order,
    unpickle,
)
from thinwire_lab.jobs.job import Source

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


def add(archive, name, data):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def cifar_archive(path, batches_of):
    with tarfile.open(path, "w:gz") as archive:
        for name, tree in batches_of.items():
            add(archive, name, tree if isinstance(tree, bytes) else pickle.dumps(tree))


def published(monkeypatch, path):
    """Let this file's sum be the published one."""
    digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    entry = images.CIFAR[path.name]
    monkeypatch.setitem(images.CIFAR, path.name, (digest, *entry[1:]))


def test_cifar_archive(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 255, (4, 3072), dtype=np.uint8)
    part = {b"data": pixels, b"fine_labels": [5, 6, 7, 8]}
    path = tmp_path / "cifar-100-python.tar.gz"
    cifar_archive(path, {"cifar-100-python/train": part, "cifar-100-python/test": part})
    with pytest.raises(MissingData, match="is damaged: its MD5 is"):
        images.cifar(tmp_path, 100)
    published(monkeypatch, path)
    train, test = images.cifar(tmp_path, 100)
    assert len(train) == len(test) == 4
    assert torch.equal(train.pixels.view(4, -1), torch.from_numpy(pixels))
    x, y = test.batch(torch.tensor([2, 0]), None)
    assert x.shape == (2, 3, 32, 32) and y.tolist() == [7, 5]


def test_the_archive_that_was_named_is_read(tmp_path, monkeypatch):
    for name, inside, files, key in (
        ("cifar-10-python.tar.gz", "cifar-10-batches-py",
         (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"), b"labels"),
        ("cifar-100-python.tar.gz", "cifar-100-python", ("train", "test"), b"fine_labels"),
    ):  # fmt: skip
        part = {b"data": np.zeros((2, 3072), np.uint8), key: [1, 2]}
        cifar_archive(tmp_path / name, {f"{inside}/{file}": part for file in files})
        published(monkeypatch, tmp_path / name)
    for name, classes, pictures in (
        ("cifar-10-python.tar.gz", 10, 10),
        ("cifar-100-python.tar.gz", 100, 2),
    ):
        task = find("resnet20").make("small", Source(data=str(tmp_path / name)))
        assert len(task.train) == pictures and task.net()[-1].out_features == classes
    with pytest.raises(MissingData, match="give the path of one of them"):
        find("resnet20").make("small", Source(data=str(tmp_path)))


def test_an_archive_that_would_run_something_is_refused(tmp_path, monkeypatch):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "was here",))

    path = tmp_path / "cifar-100-python.tar.gz"
    cifar_archive(path, {"cifar-100-python/train": pickle.dumps(Evil())})
    published(monkeypatch, path)
    with pytest.raises(MissingData, match="has no place in a data set"):
        images.cifar(tmp_path, 100)
    assert not (tmp_path / "was here").exists()


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"garbage", pickle.dumps(print)])
def test_broken_pickles_are_one_message(data):
    with pytest.raises(MissingData, match="is not the data it should be"):
        unpickle(data, "it")


def test_mnist_files(tmp_path, monkeypatch):
    pixels = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)
    for name in images.MNIST:
        body = pixels if "images" in name else np.array([1, 2, 3], np.uint8)
        head = bytes([0, 0, 8, body.ndim]) + np.array(body.shape, ">i4").tobytes()
        data = gzip.compress(head + body.tobytes())
        (tmp_path / name).write_bytes(data)
        digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
        monkeypatch.setitem(images.MNIST, name, digest)
    train, test = images.mnist(tmp_path)
    assert torch.equal(train.pixels[:, 0], torch.from_numpy(pixels))
    assert test.labels.tolist() == [1, 2, 3]
    for cut in (0, 3, 10):
        damaged = gzip.compress((bytes([0, 0, 8, 3]) + b"\0\0\0\x05" * 3)[:cut])
        (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(damaged)
        digest = hashlib.md5(damaged, usedforsecurity=False).hexdigest()
        monkeypatch.setitem(images.MNIST, "t10k-images-idx3-ubyte.gz", digest)
        with pytest.raises(MissingData, match="is no IDX file"):
            images.mnist(tmp_path)


def test_folders_of_pictures(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        for kind in ("cat", "dog"):
            folder = tmp_path / part / kind
            folder.mkdir(parents=True)
            for number in range(2):
                image.new("RGB", (40, 30), (number, 200, 0)).save(folder / f"{number}.JPEG")
    train, test = images.image_folders(tmp_path, 16)
    x, y = train.batch(torch.tensor([0, 3]), torch.Generator().manual_seed(0))
    assert x.shape == (2, 3, 16, 16) and y.tolist() == [0, 1] and bool(x.isfinite().all())
    one, two = (test.batch(torch.tensor([1]), None)[0] for _ in range(2))
    assert torch.equal(one, two)
    assert test.labels.tolist() == [0, 0, 1, 1]
    for job in ("resnet20", "vgg16"):  # networks for 32 pixels see them at that size
        task = find(job).make("small", Source(data=str(tmp_path)))
        assert task.train.batch(torch.tensor([0]), None)[0].shape == (1, 3, 32, 32)
        assert task.net()[-1].out_features == 2
    task = find("vit").make("small", Source(data=str(tmp_path)))  # as does a small transformer
    assert task.train.batch(torch.tensor([0]), None)[0].shape == (1, 3, 32, 32)
    image.new("RGB", (8, 8)).save(tmp_path / "whole.png")
    cut = (tmp_path / "whole.png").read_bytes()
    torn = (b"no picture", cut[:20], cut[:8] + bytes(30), cut[:-30])
    for content in torn:
        (tmp_path / "val" / "cat" / "0.JPEG").write_bytes(content)
        with pytest.raises(MissingData, match=r"0\.JPEG is no picture"):
            test.batch(torch.tensor([0]), None)
    with pytest.raises(MissingData, match=r"^[^\n]*0\.JPEG is no picture[^\n]*$"):  # one line
        list(batches(test, pick_in_order(4, 2, 0, 1), loaders=1))
    with pytest.raises(MissingData, match="expected train/<class>"):
        images.image_folders(tmp_path / "train", 16)
    for part in ("train", "val"):  # left behind by an editor
        (tmp_path / part / ".ipynb_checkpoints").mkdir()
    assert images.kinds(tmp_path / "train") == ["cat", "dog"]
    assert images.image_folders(tmp_path, 16)[0].labels.tolist() == [0, 0, 1, 1]
    (tmp_path / "val" / "emu").mkdir()
    with pytest.raises(MissingData, match="has kinds that train/ lacks: emu"):
        images.image_folders(tmp_path, 16)
    (tmp_path / "train" / "emu").mkdir()
    with pytest.raises(MissingData, match=r"emu has no pictures; every folder of train/ is a cla"):
        images.image_folders(tmp_path, 16)


def test_an_npz_must_hold_what_it_should(tmp_path):
    path = tmp_path / "x.npz"
    np.save(tmp_path / "x.npy", np.zeros(3))
    pixels, labels = np.zeros((5, 32, 32, 3), np.uint8), np.zeros(5, np.int64)
    whole = dict(zip(images.NPZ_NAMES, (pixels, pixels, labels, labels), strict=True))
    for content, message in (
        (b"nothing", "cannot be read"),
        (b"", "cannot be read"),
        ((tmp_path / "x.npy").read_bytes(), "cannot be read"),
        ({"a": np.zeros(3)}, "holds a; expected train_images"),
        (dict.fromkeys(images.NPZ_NAMES, np.zeros(3)), "train_images is float64"),
        (whole | {"test_images": pixels[0]}, "test_images is"),
        (whole | {"test_images": pixels[:, :28, :28]}, r"test_images is uint8 \(5, 28, 28, 3\)"),
        (whole | {"test_images": pixels.transpose(0, 3, 1, 2)}, "make them alike"),
        (whole | {"test_labels": labels[:4]}, r"test_labels is int64 \(4,\) for 5 pictures"),
        (whole | {"train_labels": labels.astype(str)}, "train_labels is <U21"),
        (whole | {"train_labels": labels + 10}, "train_labels are not 0 to 9"),
    ):
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            np.savez(path, **content)
        with pytest.raises(MissingData, match=message):
            images.cifar(path, 10)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no sample data beside the project")
def test_the_real_samples():
    train, test = images.cifar(SHARED / "cifar10-12k.npz", 10)
    assert (len(train), len(test)) == (10_000, 2_000)
    assert sorted(train.labels.unique().tolist()) == list(range(10))
    x, _ = train.batch(torch.arange(64), torch.Generator().manual_seed(0))
    assert x.shape == (64, 3, 32, 32) and abs(float(x.mean())) < 0.5
    first, second = text.corpus(SHARED / "wikitext-2")
    assert len(first) > 1_000_000 and len(second) > 1_000_000 and first != second


def test_pictures_move_and_turn_but_keep_what_they_show():
    pixels = torch.zeros(64, 1, 8, 8, dtype=torch.uint8)
    pixels[:, :, 3:5, 3] = 255
    moved = images._shift(pixels, 2, torch.Generator().manual_seed(0))
    assert moved.shape == pixels.shape
    assert (moved.view(64, -1) > 0).sum(dim=1).tolist() == [2] * 64
    assert len({tuple(m.view(-1).tolist()) for m in moved}) > 10


def test_words_are_numbered_by_how_often_they_come():
    both = ("a b a c a b <unk>\n", "a zebra b\n")
    (first, second), count = text.words(both, 4, text.split_at_spaces)
    assert count == 4
    assert first.tolist() == [1, 2, 1, 0, 1, 2, 0, 3]
    assert second.tolist() == [1, 0, 2, 3]
    assert text.split_at_spaces("do n't @-@ x\n") == ["do", "n't", "@-@", "x", "<eos>"]
    assert text.signs("f(x)\n") == ["f", "(", "x", ")", "\n"]
    window = text.Windows(torch.arange(11), 5)
    x, y = window.batch(torch.tensor([1]), None)
    assert len(window) == 2 and x.tolist() == [[5, 6, 7, 8, 9]] and y.tolist() == [[6, 7, 8, 9, 10]]


def test_text_folders(tmp_path):
    with pytest.raises(MissingData, match="has not two parts of a text; expected train"):
        text.corpus(tmp_path)
    (tmp_path / "wiki.train.tokens").write_text("one two")
    (tmp_path / "wiki.test.tokens").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(MissingData, match="is no UTF-8 text"):
        text.corpus(tmp_path)
    (tmp_path / "wiki.test.tokens").write_text("three")
    assert text.corpus(tmp_path) == ("one two", "three") and text.validation(tmp_path) is None
    (tmp_path / "wiki.valid.tokens").write_text("four")
    assert text.corpus(tmp_path) == ("one two", "three") and text.validation(tmp_path) == "four"


def test_of_any_other_text_the_last_tenth_is_for_the_test(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} line {i}\n" for i in range(50)))
    train, test = text.corpus(tmp_path)
    assert train.startswith("a line 0\n") and test.endswith("b line 49\n")
    assert train.endswith("\n") and 0.85 < len(train) / len(train + test) < 0.95
    assert sum(map(len, text.corpus(tmp_path / "a.txt"))) == len((tmp_path / "a.txt").read_text())


def test_sentences_are_masked_as_bert_has_it():
    pytest.importorskip("tokenizers")
    train, _ = text.library(60_000)
    learnt = text.word_pieces(train, 400)
    data = text.sentences(learnt, train, 32)
    ids, kinds, there, labels, follows = data.batch(
        torch.arange(200), torch.Generator().manual_seed(0)
    )
    words = int(there.sum()) - 3 * 200
    guessed = labels >= 0
    assert 0.12 < int(guessed.sum()) / words < 0.19
    masked = (ids == data.marks[text.MASK]) & guessed
    kept = (ids == labels) & guessed
    changed = guessed & ~masked & ~kept
    for part, low, high in ((masked, 0.74, 0.86), (kept, 0.06, 0.14), (changed, 0.06, 0.14)):
        assert low < int(part.sum()) / int(guessed.sum()) < high
    whole = torch.where(guessed, labels, ids)
    for row in range(20):  # 0 says that the second sentence is the next one, as transformers has it
        start = int((kinds[row] == 1).nonzero()[0])
        second = whole[row, start : int(there[row].sum()) - 1]
        next_one = data._line(int(data.firsts[row]) + 1)
        assert (int(follows[row]) == 0) == torch.equal(second, next_one[: len(second)])
    assert 0.4 < float(follows.float().mean()) < 0.6
    assert bool(guessed.any(dim=1).all())  # at least one a row
    assert bool((ids[:, 0] == data.marks[text.FIRST]).all())
    assert bool(((kinds == 1) <= (there == 1)).all())


def test_sentences_follow_each_other_in_their_paragraph():
    pytest.importorskip("tokenizers")
    some = ("= A title =\n\nIt was one day. Then it was two ! Yes.\nA line of words\n \n"
            "The other part .")  # fmt: skip
    learnt = text.word_pieces(some, 200)
    data = text.sentences(learnt, some, 32)
    said = [learnt.decode(data._line(i).tolist()) for i in range(len(data.starts) - 1)]
    assert said == ["= a title =", "it was one day.", "then it was two!", "a line of words",
                    "the other part."]  # fmt: skip
    assert data.firsts.tolist() == [1, 2] and len(data) == 2
    with pytest.raises(MissingData, match="no paragraph of two sentences"):
        text.sentences(learnt, "One line of words\n\nAnother line of words", 32)


def test_a_long_text_is_read_in_stretches(monkeypatch):
    pytest.importorskip("tokenizers")
    train, _ = text.library(30_000)
    learnt = text.pieces(train, 300)
    whole = text.tokens(learnt, train)
    sentences = text.sentences(text.word_pieces(train, 300), train, 32)
    monkeypatch.setattr(text, "AT_ONCE", 997)
    monkeypatch.setattr(text, "LINES_AT_ONCE", 7)
    parts = list(text._stretches(train))
    assert "".join(parts) == train and max(map(len, parts)) <= 997
    assert all(part.endswith("\n") for part in parts[:-1])
    assert learnt.decode(text.tokens(learnt, train).tolist()) == learnt.decode(whole.tolist())
    again = text.sentences(text.word_pieces(train, 300), train, 32)
    assert torch.equal(again.ids, sentences.ids) and torch.equal(again.starts, sentences.starts)
    assert text.Windows(whole, 8).batch(torch.tensor([1]), None)[0].dtype == torch.int64


def test_a_damaged_tokenizer_is_one_message(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(MissingData, match=r"tokenizer\.json is no tokenizer"):
        text.pieces("", 10, tmp_path)


def test_a_tokenizer_reads_all_of_a_text_whatever_it_was_last_used_for(tmp_path):
    pytest.importorskip("tokenizers")
    words = "one two three four five six " * 40
    learnt = text.pieces(words, 60)
    every = text.tokens(learnt, words)
    learnt.enable_truncation(16)
    learnt.enable_padding(length=5000)
    learnt.save(str(tmp_path / "tokenizer.json"))
    again = text.tokens(text.pieces("", 10, tmp_path), words)
    assert torch.equal(again, every) and 16 < len(every) < 5000


def test_squad_windows_hold_the_answer(tmp_path):
    pytest.importorskip("tokenizers")
    context = "The quick brown fox jumps over the lazy dog near the old river bank. " * 6
    begin = context.rindex("lazy dog")
    tree = {"data": [{"paragraphs": [{"context": context, "qas": [
        {"question": "Who is lazy?", "answers": [{"answer_start": begin, "text": "lazy dog"}]}
    ]}]}]}  # fmt: skip
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        (tmp_path / name).write_text(json.dumps(tree))
    asked, _ = questions.squad(tmp_path)
    learnt = text.word_pieces(context + " who is lazy ?", 200)
    data = questions.windows(asked, learnt, 40, 16)
    answered = [w for w in data.windows if w.start]
    assert len(data) > 2 and answered
    for window in answered:
        said = context[window.spans[window.start][0] : window.spans[window.end][1]]
        assert said == "lazy dog"
        scores = [
            torch.nn.functional.one_hot(torch.tensor(p), 40) for p in (window.start, window.end)
        ]
        _, a, b = questions.best_span(*scores, window.spans)
        assert context[a:b] == "lazy dog"
    (tmp_path / "dev-v1.1.json").write_text('{"data": [{}]}')
    with pytest.raises(MissingData, match=r"is not SQuAD v1\.1"):
        questions.squad(tmp_path)
    answer = tree["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]
    for begin in (-1, len(context) - 3, 4000):
        answer["answer_start"] = begin
        (tmp_path / "dev-v1.1.json").write_text(json.dumps(tree))
        with pytest.raises(MissingData, match=rf"'lazy dog' at {begin} is not in its text of 414"):
            questions.squad(tmp_path)
    whole = json.dumps(tree)
    for old, new in ((r'"Who is lazy?"', "7"), (r'"Who is lazy?"', "null"), ("4000", "Infinity"),
                     (json.dumps(context), '["a"]'), (whole, "[" * 100_000)):  # fmt: skip
        (tmp_path / "dev-v1.1.json").write_text(whole.replace(old, new))
        with pytest.raises(
            MissingData, match=r"dev-v1\.1\.json is not SQuAD v1\.1 .*; get it anew"
        ):
            questions.squad(tmp_path)


@pytest.mark.parametrize(
    ("said", "answers", "exact", "f1"),
    [("The Cat!", ["cat"], 1.0, 1.0), ("a black cat", ["cat"], 0.0, 2 / 3), ("", ["cat"], 0.0, 0.0),
     ("dog", ["cat", "dog"], 1.0, 1.0), ("x y", ["y x"], 0.0, 1.0)],
)  # fmt: skip
def test_answers_are_scored_as_the_official_script_does(said, answers, exact, f1):
    assert questions.exact_match(said, answers) == exact
    assert questions.f1(said, answers) == pytest.approx(f1)


def test_recordings(tmp_path):
    for part in ("train", "test"):
        folder = tmp_path / part / "an4"
        (folder / "wav").mkdir(parents=True)
        (folder / "txt").mkdir()
        with wave.open(str(folder / "wav" / "one.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes(np.zeros(8000, np.int16).tobytes())
        (folder / "txt" / "one.txt").write_text("yes no\n")
    train, test = speech.an4(tmp_path)
    sounds, frames, letters, lengths = train.batch(torch.tensor([0]), None)
    assert sounds.shape == (1, 1, 161, 51) and frames.tolist() == [51] and lengths.tolist() == [6]
    assert "".join(speech.ALPHABET[i] for i in letters[0].tolist()) == "YES NO"
    recording = tmp_path / "test" / "an4" / "wav" / "one.wav"
    whole = recording.read_bytes()
    size = (300).to_bytes(4, "little")
    short = whole[:40] + size + whole[44:344]
    for left, message in ((whole[:44], "is cut off"), (whole[:999], "is cut off"),
                          (b"RIFF", "is no recording"), (short, "has 150 samples; expected 320"),
                          (whole[:16] + b"\xff\xff" + whole[18:], "is no recording")):  # fmt: skip
        recording.write_bytes(left)
        with pytest.raises(MissingData, match=message):
            test.batch(torch.tensor([0]), None)
    assert speech.encode_text("...").dtype == torch.int64
    other = tmp_path / "train" / "other" / "one.txt"
    other.parent.mkdir()
    other.write_text("no\n")
    with pytest.raises(MissingData, match=r"one\.txt and .*one\.txt have one name"):
        speech.an4(tmp_path)
    other.unlink()
    transcript = tmp_path / "test" / "an4" / "txt" / "one.txt"
    for damaged, message in (
        (b"\xff\xfe", "is no text"),
        (b" ", "no letters"),
        (b"1 2", "no lett"),
    ):
        transcript.write_bytes(damaged)
        with pytest.raises(MissingData, match=rf"one\.txt .*{message}"):
            speech.an4(tmp_path)
    transcript.unlink()
    with pytest.raises(MissingData, match="without its transcript; expected train"):
        speech.an4(tmp_path)


@pytest.mark.parametrize(
    ("said", "right", "edits"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("same", "same", 0)],
)
def test_edits(said, right, edits):
    assert speech.edits(said, right) == edits


def test_greedy_letters():
    scores = torch.zeros(6, 29)
    for frame, letter in enumerate("AA_AB_"):
        scores[frame, speech.ALPHABET.index(letter)] = 1
    assert speech.greedy(scores) == "AAB"


def test_shards_share_every_epoch_and_go_on_where_they_stopped():
    size, batch, world = 50, 4, 3
    picks = [
        [p.chosen for p, _ in zip(Shards(size, batch, rank, world, 7, 0), range(9), strict=False)]
        for rank in range(world)
    ]
    epoch = torch.cat([pick for rank in picks for pick in rank[:4]])
    assert len(epoch.unique()) == len(epoch) == 48
    later = next(iter(Shards(size, batch, 1, world, 7, 6)))
    assert torch.equal(later.chosen, picks[1][6])
    assert not torch.equal(picks[0][0], picks[0][4])
    with pytest.raises(ValueError, match="fewer than one batch of 40 on each of 2 workers"):
        Shards(50, 40, 0, 2, 0, 0)


def test_test_data_is_dealt_out_once():
    every = [p.chosen for rank in range(3) for p in pick_in_order(50, 4, rank, 3)]
    assert sorted(torch.cat(every).tolist()) == list(range(50))


def test_loaders_in_other_processes_give_the_same():
    train, _ = images.digits(8, 1, crop=2)
    picks = [Pick(torch.arange(4), 3), Pick(torch.arange(4, 8), None)]
    for mine, theirs in zip(batches(train, picks), batches(train, picks, 2), strict=True):
        assert torch.equal(mine[0], theirs[0])


def test_loaders_outlive_a_signal_to_the_whole_group():
    """The training takes its last step, saves and ends; till then it wants batches."""
    train, _ = images.digits(8, 1, crop=2)
    others = set(multiprocessing.active_children())
    stream = batches(train, [Pick(torch.arange(4), None)] * 40, loaders=1)
    next(stream)
    (loader,) = set(multiprocessing.active_children()) - others
    for number in (signal.SIGTERM, signal.SIGINT):  # by somebody else
        subprocess.run([sys.executable, "-c", f"import os; os.kill({loader.pid}, {number})"])
    assert len(list(stream)) == 39


def test_a_process_that_fails_ends_with_its_loaders():
    """An error that nobody catches keeps them till the end, when Python tells them to go."""
    script = (
        "import torch\nfrom thinwire_lab.jobs.data import images\n"
        "from thinwire_lab.jobs.data.source import Pick, batches\n"
        "stream = batches(images.digits(8, 1)[0], [Pick(torch.arange(4), None)] * 99, 1)\n"
        "next(stream)\nraise RuntimeError('of ours')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True)
    assert ended.returncode == 1 and b"of ours" in ended.stderr


def test_missing_data_says_what_is_expected(tmp_path):
    with pytest.raises(MissingData, match="--size paper needs --data: the files, or fake"):
        Source().folder("paper", "the files")
    with pytest.raises(MissingData, match=r"there is no .*nowhere; --data expects the files"):
        Source(data=tmp_path / "nowhere").folder("tiny", "the files")
    with pytest.raises(
        MissingData, match=r"neither train/ nor one of cifar-10-python.tar.gz, cifar-100"
    ):
        find("vgg16").make("small", Source(data=str(tmp_path)))


@pytest.mark.parametrize("names", [("ptb.train.txt", "ptb.test.txt"), ("train.txt", "test.txt"),
                                   ("wiki.train.raw", "wiki.test.raw")])  # fmt: skip
def test_texts_have_the_names_they_were_published_under(names, tmp_path):
    for name, words in zip(names, ("one two", "three"), strict=True):
        (tmp_path / name).write_text(words)
    assert text.corpus(tmp_path) == ("one two", "three")


def test_files_that_are_missing_or_damaged_are_named_with_the_layout(tmp_path):
    with pytest.raises(MissingData, match=r"has no train-images-idx3-ubyte.gz, .*; expected MNIST"):
        images.mnist(tmp_path)
    for name in images.MNIST:
        (tmp_path / name).write_bytes(b"torn")
    with pytest.raises(MissingData, match=r"is damaged: its MD5 is .*, published is .*; get it"):
        images.mnist(tmp_path)


def test_a_library_that_is_not_there_is_asked_for():
    with pytest.raises(ValueError, match=r"needs no_such_library: pip install 'thinwire\[jobs\]'"):
        load_library("no_such_library")
