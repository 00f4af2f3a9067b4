"""Networks and settings are those of the papers; checkpoints, losses and figures."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="transformers is not installed")

from thinwire_lab.jobs import bert, language, speech
from thinwire_lab.jobs.catalogue import JOBS, find
from thinwire_lab.jobs.data import text
from thinwire_lab.jobs.data.source import MissingData
from thinwire_lab.jobs.job import SIZES, Source
from thinwire_lab.jobs.networks import hub, recurrent

PUBLISHED = {
    "mnist": 1_199_882,
    "resnet20": 269_722,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "vgg16": 14_728_266,
    "vit": 304_326_632,
    "lstm-lm": 66_034_000,
    "lstm-wiki": 37_319_278,  # 2 (33,278 x 500) words, 33,278 biases, 2 x 4 (1,000 + 2) 500
    "lstm-an4": 27_569_568,
    "bert": 110_106_428,
    "bert-large": 336_226_108,
    "squad": 108_893_186,
    "squad-large": 334_094_338,
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
}


def parameters(name: str) -> int:
    task = find(name).make("paper", Source(data="fake"))
    with torch.device("meta"):
        net = task.net()
    return sum(p.numel() for p in net.parameters())  # tied ones once


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_at_paper_size(name):
    assert parameters(name) == PUBLISHED[name]


def test_every_job_is_counted_or_has_no_paper():
    assert set(JOBS) - set(PUBLISHED) == {"mlp"}


def test_every_job_has_every_size():
    for job in JOBS.values():
        assert set(job.sizes) == set(SIZES)


def test_ok_topks_untied_bert_is_the_tied_one_and_another_embedding():
    assert parameters("bert") + 30_522 * 768 == 133_547_324


def test_unknown_jobs_are_named_with_those_there_are():
    with pytest.raises(ValueError, match="unknown job 'resnet18'; known are mlp, mnist, resnet20"):
        find("resnet18")


PAPERS = {  # as the papers' scripts have them
    "resnet20": ("sgd", 32, 0.1, 141, 0.9, 1e-4, "milestones", (81, 122)),
    "vgg16": ("sgd", 16, 0.1, 161, 0.9, 1e-4, "milestones", (81, 122, 155)),
    "resnet50": ("sgd", 32, 0.0125, 80, 0.9, 5e-5, "milestones", (30, 60)),
    "resnet152": ("sgd", 32, 0.0125, 80, 0.9, 5e-5, "milestones", (30, 60)),
    "vit": ("adamw", 32, 5e-5, 80, 0.9, 0.0, "linear", ()),
    "lstm-lm": ("sgd", 20, 1.0, 50, 0.0, 0.0, "constant", ()),
    "lstm-wiki": ("adam", 80, 1e-3, 120, 0.9, 1.2e-6, "plateau", ()),
    "lstm-an4": ("sgd", 2, 1e-3, 100, 0.9, 1e-4, "milestones", tuple(range(1, 100))),
    "gpt2": ("adamw", 2, 5e-5, 30, 0.9, 0.0, "linear", ()),
    "squad": ("adamw", 4, 3e-5, 3, 0.9, 0.01, "linear", ()),
    "squad-large": ("adamw", 4, 3e-5, 30, 0.9, 0.01, "linear", ()),
}


@pytest.mark.parametrize("name", PAPERS)
def test_hyper_parameters_at_paper_size(name):
    s = find(name).sizes["paper"]
    assert (s.optimizer, s.batch, s.rate, s.epochs, s.momentum, s.weight_decay, s.schedule,
            s.milestones) == PAPERS[name]  # fmt: skip
    assert s.rate_by_workers is (name in ("resnet50", "resnet152", "lstm-wiki"))
    assert s.warmup == {"resnet20": 10, "vgg16": 10, "resnet50": 5, "resnet152": 5, "squad": 0.3,
                        "squad-large": 3}.get(name, 0)  # fmt: skip
    assert s.clip == {"lstm-lm": 0.25, "lstm-wiki": 0.1, "lstm-an4": 400, "squad": 1,
                      "squad-large": 1}.get(name, 0)  # fmt: skip


@pytest.mark.parametrize("name", ["lstm-lm", "lstm-wiki", "gpt2", "bert", "squad"])
def test_shorter_texts_of_the_same_network(name):
    short, own = (find(name).make("tiny", Source(length=n)) for n in (17, 0))
    at = torch.tensor([0, 1])
    assert short.train.batch(at, None)[0].shape == (2, 17)
    counts = [sum(p.numel() for p in task.net().parameters()) for task in (short, own)]
    assert counts[0] == counts[1]
    with pytest.raises(ValueError, match="length must be at most"):
        find(name).make("tiny", Source(length=1000))


@pytest.mark.parametrize("name", ["bert", "bert-large"])
def test_hyper_parameters_of_pretraining(name):
    s = find(name).sizes["paper"]
    assert (s.optimizer, s.batch, s.rate, s.steps, s.warmup_steps, s.weight_decay, s.schedule,
            s.epsilon) == ("adamw", 8, 2e-4, 286_720, 28_672, 0.01, "linear", 1e-6)  # fmt: skip


def test_a_step_at_paper_size_is_documented_for_every_job():
    text = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    block = text.partition("## One step at paper size")[2].split("```")[1]
    named = re.findall(r"for job in (.*); do", block) + re.findall(r"train ([a-z]\S*)", block)
    assert sorted(" ".join(named).split()) == sorted(JOBS)
    assert '--recipe "adtopk(density=0.01)"' in block and "--size paper --data fake" in block


@pytest.fixture(scope="module")
def saved_gpt2(tmp_path_factory):
    """What `--checkpoint` takes: a network and its tokenizer."""
    folder = tmp_path_factory.mktemp("gpt2")
    source, _ = text.library(30_000)
    learnt = text.pieces(source, 300)
    net = hub.gpt2(32, 1, 2, learnt.get_vocab_size(), 32)
    net.save_pretrained(folder)
    learnt.save(str(folder / "tokenizer.json"))
    return folder, net


def test_a_checkpoint_is_where_training_begins(saved_gpt2):
    folder, net = saved_gpt2
    task = find("gpt2").make("tiny", Source(checkpoint=folder))
    theirs = task.net().state_dict()
    assert all(torch.equal(theirs[name], mine) for name, mine in net.state_dict().items())
    assert int(task.train.stream.max()) < net.config.vocab_size


def test_a_checkpoint_that_cannot_read_the_text_is_refused(saved_gpt2, tmp_path):
    folder, _ = saved_gpt2
    shutil.copytree(folder, tmp_path / "short")
    hub.gpt2(32, 1, 2, 300, 24).save_pretrained(tmp_path / "short")
    task = find("gpt2").make("tiny", Source(checkpoint=tmp_path / "short"))
    with pytest.raises(MissingData, match=r"reads 24 words at once, not 32; give --set length=24"):
        task.net()
    assert find("gpt2").make("tiny", Source(checkpoint=tmp_path / "short", length=24)).net()
    hub.bert(32, 1, 2, 200, task="pretraining").save_pretrained(tmp_path / "short")
    for job in ("bert", "squad"):
        task = find(job).make("tiny", Source(checkpoint=tmp_path / "short", data="fake"))
        with pytest.raises(MissingData, match=r"knows 200 words, the text has 600; give the token"):
            task.net()


def test_a_checkpoint_of_another_kind_or_a_damaged_one_is_refused(saved_gpt2, tmp_path):
    folder, _ = saved_gpt2
    with pytest.raises(MissingData, match=r"holds a gpt2.*; this job continues a bert"):
        hub.bert(32, 1, 2, 300, task="pretraining", checkpoint=folder)
    with pytest.raises(MissingData, match=r"has no model.safetensors; expected a checkpoint"):
        hub.gpt2(32, 1, 2, 300, 32, tmp_path)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(MissingData, match="cannot be loaded"):
        hub.gpt2(32, 1, 2, 300, 32, tmp_path)


def test_speech_is_scored_by_whole_recordings_and_silence_behind_them_changes_nothing():
    """As Ok-Topk's rate is meant: the loss is a recording's, not a letter's."""
    torch.manual_seed(0)
    scores, letters = torch.randn(2, 30, 29), torch.randint(1, 29, (2, 8))
    steps, lengths = torch.tensor([30, 25]), torch.tensor([8, 5])
    each = [
        F.ctc_loss(scores[i, : steps[i], None].log_softmax(2), letters[i : i + 1, : lengths[i]],
                   steps[i : i + 1], lengths[i : i + 1], reduction="sum")
        for i in range(2)
    ]  # fmt: skip
    loss = recurrent.ctc_loss(scores, steps, letters, lengths)
    assert float(loss) == pytest.approx(float(sum(each)) / 2, rel=1e-5)
    net = recurrent.SpeechLstm(16, 2, 2).eval()
    sounds, frames = torch.randn(1, 1, 161, 60), torch.tensor([60])
    padded = F.pad(sounds, (0, 24))
    with torch.no_grad():
        (alone, count), (longer, same) = net(sounds, frames), net(padded, frames)
    assert torch.equal(count, same)
    assert torch.allclose(alone[0, : int(count)], longer[0, : int(count)], atol=1e-5)


def test_figures_of_rows_that_were_counted():
    rows = torch.tensor([[1.0, 2.0, 3.0, 10.0], [1.0, 2.0, 1.0, 10.0]])
    assert speech._error_rates(rows) == {"wer": 0.5, "cer": 0.2}
    found = language._perplexity(torch.tensor([[4.0, 3.0], [2.0, 3.0]]))
    assert found == pytest.approx({"perplexity": math.e, "test_loss": 1.0})
    # question, how sure, exact, F1: of each question's windows the surest one counts
    answers = [[0, 0.1, 1.0, 1.0], [0, 0.9, 0.0, 0.5], [1, -3.0, 1.0, 1.0]]
    found = bert._answer_figures(torch.tensor(answers))
    assert found == {"f1": 0.75, "exact_match": 0.5}
    figures = bert._bert_figures(torch.tensor([[6.0, 1.0, 4.0, 2.0, 3.0, 4.0]]))
    assert figures == {"test_loss": 2.0, "masked_accuracy": 0.25, "next_accuracy": 0.75}


@pytest.mark.parametrize("name", JOBS)
def test_every_size_can_be_made_and_a_desktops_is_smaller(name):
    sizes = {}
    for size in ("tiny", "small"):
        task = find(name).make(size, Source(data="fake"))
        with torch.device("meta"):
            sizes[size] = sum(p.numel() for p in task.net().parameters())
    assert sizes["tiny"] <= sizes["small"] <= PUBLISHED.get(name, 10**8)


def test_bodies_are_taken_from_a_checkpoint_and_heads_begin_anew(tmp_path):
    """BERT of pretraining for questions; pictures of other classes."""
    hub.bert(32, 1, 2, 300, task="pretraining").save_pretrained(tmp_path / "bert")
    hub.resnet((1, 1, 1, 1), (8, 8, 8, 8), 10, 8).save_pretrained(tmp_path / "resnet")
    hub.vit(32, 1, 2, 32, 8, 10).save_pretrained(tmp_path / "vit")
    loaded = [
        hub.bert(64, 2, 2, 999, task="questions", checkpoint=tmp_path / "bert"),
        hub.resnet((3, 4, 6, 3), (8, 8, 8, 8), 7, 8, tmp_path / "resnet"),
        hub.vit(64, 2, 2, 32, 8, 7, tmp_path / "vit"),
    ]
    assert loaded[0].config.vocab_size == 300 and loaded[0].qa_outputs.weight.shape == (2, 32)
    assert loaded[1](torch.zeros(2, 3, 32, 32)).logits.shape == (2, 7)
    assert loaded[2](torch.zeros(2, 3, 32, 32)).logits.shape == (2, 7)
    with pytest.raises(MissingData, match="is for pictures of 32 pixels, these have 224"):
        hub.vit(64, 2, 2, 224, 8, 7, tmp_path / "vit")
