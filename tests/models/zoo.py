"""One tiny model per architecture family: random weights, one or two layers, no download.

The weights are drawn wider than the libraries' defaults so that every layer matters: with the usual
0.02 a two-layer model is almost the identity and a wrong attention would pass unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from tests.support import torches

VOCABULARY = 256
HIDDEN = 64
LAYERS = 2
HEADS = 4
BATCH = 2
LENGTH = 8
IMAGE = 32
LABELS = 5
SPREAD = 0.15
# transformers asks it of attention with grouped heads, where it makes a difference.
GROUPED_HEADS_ASK = bool(torches.no_fused_grouped_heads())
EXPERTS_READ_NUMBERS = (
    "before 5.23 the experts of transformers read numbers of tensors in their backward pass"
    if Version(transformers.__version__) < Version("5.23")
    else ""
)
# Left out, the head writes it into the config at the first call, and the second one recompiles.
KIND = "single_label_classification"

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Entry:
    """A model, its inputs for a seed (with labels), and what is known of its gradients."""

    name: str
    build: Callable[[], PreTrainedModel]
    inputs: Callable[[torch.Generator], Inputs]
    # Parameters whose gradient is zero in exact arithmetic, so that only rounding noise is seen:
    # softmax does not change when one number is added to all scores, which a key bias does.
    null_gradients: tuple[str, ...] = ()
    # The model asks whether Dynamo traces it and then computes in another way, so no backend can
    # give eager's bits: O0 is compared with the same trace run by torch's own "eager" backend.
    asks_if_traced: bool = False
    # Why no compiler can trace a backward pass; it falls back to eager, with a warning.
    untraceable_backward: str = ""

    def model(self) -> PreTrainedModel:
        torch.manual_seed(0)
        return self.build().eval()

    def batch(self, seed: int) -> Inputs:
        return self.inputs(torch.Generator().manual_seed(seed))


def _tokens(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=generator)


def _text_with_class(generator: torch.Generator) -> Inputs:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, LENGTH // 2 :] = 0  # the second text is shorter
    labels = torch.randint(LABELS, (BATCH,), generator=generator)
    return {"input_ids": _tokens(generator), "attention_mask": mask, "labels": labels}


def _text(generator: torch.Generator) -> Inputs:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _short_text(generator: torch.Generator) -> Inputs:
    """A state-space model unrolls its scan over time: compile time grows with the length."""
    tokens = _tokens(generator, LENGTH // 2)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _two_texts(generator: torch.Generator) -> Inputs:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator, LENGTH // 2)}


def _image(generator: torch.Generator) -> Inputs:
    return {
        "pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(LABELS, (BATCH,), generator=generator),
    }


def _bert() -> PreTrainedModel:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=2 * LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=SPREAD,
        num_labels=LABELS,
        problem_type=KIND,
    )
    return BertForSequenceClassification(config)


def _llama() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=128,
        initializer_range=SPREAD,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _vit() -> PreTrainedModel:
    config = ViTConfig(
        image_size=IMAGE,
        patch_size=8,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * HIDDEN,
        initializer_range=SPREAD,
        num_labels=LABELS,
        problem_type=KIND,
    )
    return ViTForImageClassification(config)


def _resnet() -> PreTrainedModel:
    config = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[2, 2],
        layer_type="basic",
        num_labels=LABELS,
        problem_type=KIND,
    )
    return ResNetForImageClassification(config)


def _t5() -> PreTrainedModel:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=HIDDEN // HEADS,
        d_ff=2 * HIDDEN,
        num_layers=LAYERS // 2,  # in the encoder, and as many in the decoder
        num_heads=HEADS,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def _mixtral() -> PreTrainedModel:
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        intermediate_size=2 * HIDDEN,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=SPREAD,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


def _mamba() -> PreTrainedModel:
    config = MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS // 2,  # a scan that is unrolled is long as it is
        state_size=8,
        initializer_range=SPREAD,
        use_cache=False,
    )
    return MambaForCausalLM(config)


ENTRIES = (
    Entry("encoder", _bert, _text_with_class, ("key.bias",)),
    Entry("decoder", _llama, _text, asks_if_traced=GROUPED_HEADS_ASK),
    Entry("vision_transformer", _vit, _image, ("k_proj.bias",)),
    Entry("cnn", _resnet, _image),
    Entry("encoder_decoder", _t5, _two_texts),
    Entry(
        "mixture_of_experts",
        _mixtral,
        _text,
        asks_if_traced=GROUPED_HEADS_ASK,
        untraceable_backward=EXPERTS_READ_NUMBERS,
    ),
    Entry("state_space", _mamba, _short_text, asks_if_traced=True),
)
BY_NAME = {entry.name: entry for entry in ENTRIES}


def outputs(result: Any) -> dict[str, torch.Tensor]:
    """What is compared: the loss and the logits, as plain tensors."""
    return {"loss": result.loss, "logits": result.logits}
