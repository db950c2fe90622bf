"""Models of timm and transformers that nothing here was tuned for: from configs, random weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.workloads.hf_wrapping import Plain
from benchmarks.workloads.initial_weights import draw
from benchmarks.workloads.pictures import random_picture
from kernel_dispatch.bench import Case, Workload

_TIMM = (
    "convnext_tiny",
    "swin_tiny_patch4_window7_224",
    "efficientnet_b0",
    "vit_base_patch16_siglip_224",
    "eva02_tiny_patch14_224",
    "coatnet_nano_rw_224",
    "regnety_008",
    "mobilenetv4_hybrid_medium",
    "xcit_nano_12_p16_224",
    "resnext50_32x4d",
    "focalnet_tiny_srf",
    "mambaout_femto",
    "mixer_b16_224",
    "pvt_v2_b1",
    "beit_base_patch16_224",
    "volo_d1_224",
    "densenet121",
    "fastvit_t8",
    "caformer_s18",
    "levit_128",
    "res2net50_26w_4s",
)
_DECODERS = (
    "gpt2",
    "qwen2",
    "gemma3_text",
    "phi3",
    "gpt_neox",
    "mixtral",
    "gpt_oss",
    "olmo2",
    "bloom",
    "opt",
    "falcon",
    "cohere2",
)
_ENCODERS = (
    "modernbert",
    "deberta-v2",
    "distilbert",
    "albert",
    "xlm-roberta",
    "esm",
    "electra",
    "roformer",
    "mpnet",
)
# Names of what a config calls its parts; each config takes those that it has.
_SIZES = {
    "hidden_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "vocab_size": 8192,
    "num_local_experts": 4,
    "pad_token_id": 0,
}
_TOKENS = 256


def workloads(batch: int) -> tuple[Workload, ...]:
    """Pictures or texts in batches of this size."""
    return (
        *(_workload("timm", name, _picture_model, batch) for name in _TIMM),
        *(_workload("transformers", name, _text_model, batch) for name in _DECODERS + _ENCODERS),
    )


def _workload(package: str, name: str, make: Callable[..., Case], batch: int) -> Workload:
    return Workload(
        f"{package}-{name}",
        partial(make, name, batch),
        f"{package}'s {name}, {batch} at a time",
        needs=(package,),
    )


def _picture_model(name: str, batch: int, small: bool = False) -> Case:
    import timm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = timm.create_model(name, pretrained=False)
    side = model.default_cfg["input_size"][-1]
    batch = 1 if small else batch
    picture = random_picture(side) + 0.1 * torch.randn(batch, 3, side, side)
    return Case(_alive(model), (picture,))


def _text_model(name: str, batch: int, small: bool = False) -> Case:
    from transformers import AutoConfig, AutoModel

    tokens = 16 if small else _TOKENS
    batch = 2 if small else batch
    config = AutoConfig.for_model(name)
    for key, value in _SIZES.items():
        if hasattr(config, key) and not isinstance(getattr(type(config), key, None), property):
            setattr(config, key, value)
    for key in vars(config):
        if "drop" in key and isinstance(getattr(config, key), float):
            setattr(config, key, 0.0)  # what is random cannot be compared
    if hasattr(config, "layer_types"):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    model = AutoModel.from_config(config)
    more: dict[str, Any] = {"use_cache": False} if name in _DECODERS else {}
    ids = torch.randint(1, config.vocab_size, (batch, tokens))
    lengths = torch.randint(tokens // 2, tokens + 1, (batch, 1))
    mask = (torch.arange(tokens) < lengths).long()
    plain = Plain(_alive(model), ("input_ids", "attention_mask"), ("last_hidden_state",), **more)
    return Case(plain, (ids, mask))


@torch.no_grad()
def _alive(model: nn.Module) -> nn.Module:
    """Weights that a wrong layer would be seen through: many models begin with branches of 1e-6."""
    draw(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() <= 1 and parameter.abs().max() < 0.05 and "bias" not in name:
            parameter.uniform_(0.2, 0.5)
    return model
