"""Networks have as many parameters as their papers say; counted on the meta device."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from thinwire.jobs.catalogue import JOBS, find
from thinwire.jobs.job import SIZES, Source

PUBLISHED = {
    "mnist": 1_199_882,
    "resnet20": 269_722,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "vgg16": 14_728_266,
    "vit": 304_326_632,
    "lstm-lm": 66_034_000,
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
