"""Large networks from `transformers` configurations: random weights, or a local checkpoint.

Published sizes: BERT-base 110,106,428 parameters (pretraining, tied), -large 336,226,108; GPT-2
124,439,808, large 774,030,080; ViT-L/16 304,326,632; ResNet-50 25,557,032, -152 60,192,808.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire_lab.errors import first_line
from thinwire_lab.jobs.data.source import MissingData, load_library

LAYOUT = "a checkpoint folder with config.json, model.safetensors and tokenizer.json"


def resnet(
    depths: tuple[int, ...], widths: tuple[int, ...], classes: int, stem: int = 64,
    checkpoint: Path | None = None,
) -> nn.Module:  # fmt: skip
    """Bottleneck ResNets. He et al. 2016 (arXiv 1512.03385)."""
    return _make(
        "ResNetForImageClassification", checkpoint, classes, depths=list(depths),
        hidden_sizes=list(widths), embedding_size=stem, layer_type="bottleneck",
    )  # fmt: skip


def vit(
    width: int, layers: int, heads: int, side: int, patch: int, classes: int,
    checkpoint: Path | None = None,
) -> nn.Module:  # fmt: skip
    """Vision transformer. Dosovitskiy et al. 2021 (arXiv 2010.11929)."""
    net = _make(
        "ViTForImageClassification", checkpoint, classes, hidden_size=width,
        num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
        image_size=side, patch_size=patch,
    )  # fmt: skip
    config: Any = net.config
    known = config.image_size
    if known not in (side, [side, side]):
        raise MissingData(
            f"{checkpoint} is for pictures of {known} pixels, these have {side}; give others"
        )
    return net


def gpt2(
    width: int, layers: int, heads: int, words: int, length: int, checkpoint: Path | None = None
) -> nn.Module:
    """Causal language model. Radford et al. 2019."""
    return _make(
        "GPT2LMHeadModel", checkpoint, n_embd=width, n_layer=layers, n_head=heads,
        vocab_size=words, n_positions=length, bos_token_id=words - 1, eos_token_id=words - 1,
    )  # fmt: skip


def bert(
    width: int, layers: int, heads: int, words: int, *, task: str, checkpoint: Path | None = None
) -> nn.Module:
    """For pretraining (masked words and next sentence) or for questions. arXiv 1810.04805."""
    kind = {"pretraining": "BertForPreTraining", "questions": "BertForQuestionAnswering"}[task]
    return _make(
        kind, checkpoint, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, vocab_size=words, max_position_embeddings=512,
    )  # fmt: skip


def _make(
    name: str, checkpoint: Path | None, classes: int | None = None, **shape: Any
) -> nn.Module:
    """The checkpoint's network, or one of this shape with random weights."""
    kind = getattr(load_library("transformers"), name)  # loaded when first needed: it takes a while
    if checkpoint is not None:
        return _load_checkpoint(kind, checkpoint, classes)
    labels = {} if classes is None else {"num_labels": classes}
    net: nn.Module = kind(kind.config_class(**shape, **labels))
    return net


def check_reader(net: nn.Module, words: int, length: int) -> nn.Module:
    """The network itself, if it can read so many words at once, numbered so high."""
    config: Any = net.config
    most, known = config.max_position_embeddings, config.vocab_size
    if length > most:
        raise MissingData(
            f"this checkpoint reads {most} words at once, not {length}; give --set length={most}"
        )
    if words > known:
        raise MissingData(
            f"this checkpoint knows {known} words, the text has {words}; give the tokenizer.json "
            "that it was trained with"
        )
    return net


def _load_checkpoint(kind: Any, folder: Path, classes: int | None = None) -> nn.Module:
    """A checkpoint in single precision; a head for other classes than ours begins anew."""
    if not (folder / "model.safetensors").is_file():
        raise MissingData(f"{folder} has no model.safetensors; expected {LAYOUT}")
    head = {} if classes is None else {"num_labels": classes, "ignore_mismatched_sizes": True}
    try:
        configs = load_library("transformers").AutoConfig
        found = configs.from_pretrained(folder, local_files_only=True).model_type
        net, read = kind.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, dtype=torch.float32,
            output_loading_info=True, **head,
        )  # fmt: skip
    except Exception as error:  # torn, foreign, of another model: all of them say it differently
        said = first_line(error)
        raise MissingData(f"{folder} cannot be loaded ({said}); expected {LAYOUT}") from None
    kin = kind.config_class.model_type
    if found != kin:
        raise MissingData(f"{folder} holds a {found}; this job continues a {kin}, give one")
    inside = [name for name in read["missing_keys"] if name.startswith(net.base_model_prefix)]
    missing = [name for name in inside if "pooler" not in name]  # some heads do without
    if missing:
        raise MissingData(f"{folder} lacks {missing[0]} and more; save the whole {kin} again")
    loaded: nn.Module = net
    return loaded
