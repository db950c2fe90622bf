"""Text models of the `transformers` package: from configs, with random weights, no download.

The weights are drawn wider than the package's 0.02, with which a layer changes almost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.workloads.hf_wrapping import Plain, StaticDecoding, freeze
from benchmarks.workloads.initial_weights import draw
from benchmarks.workloads.text_encoder import BRANCH_GAIN
from kernel_dispatch.bench import Case, Workload


@dataclass(frozen=True)
class Sizes:
    vocabulary: int
    width: int
    hidden: int
    heads: int
    key_heads: int
    layers: int
    tokens: int

    @property
    def spread(self) -> float:
        return self.width**-0.5

    def draw_tokens(self, count: int | None = None) -> torch.Tensor:
        return torch.randint(3, self.vocabulary, (1, count or self.tokens))

    def grouped(self) -> dict[str, Any]:
        """What the configs of Llama and its kin call these sizes."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "initializer_range": self.spread,
        }


BERT = Sizes(30522, 768, 3072, heads=12, key_heads=12, layers=12, tokens=128)
GPT2 = Sizes(50257, 768, 3072, heads=12, key_heads=12, layers=12, tokens=256)
LLAMA = Sizes(32000, 768, 3072, heads=12, key_heads=4, layers=12, tokens=256)
QWEN3 = Sizes(32000, 1024, 2816, heads=16, key_heads=4, layers=4, tokens=512)
T5 = Sizes(32128, 512, 2048, heads=8, key_heads=8, layers=6, tokens=128)
MIXTRAL = Sizes(32000, 512, 1024, heads=8, key_heads=2, layers=4, tokens=128)
MAMBA = Sizes(32000, 512, 1024, heads=1, key_heads=1, layers=4, tokens=16)
SMALL = Sizes(64, 32, 64, heads=4, key_heads=2, layers=2, tokens=8)


def hf_bert(small: bool = False) -> Case:
    from transformers import BertConfig, BertModel

    sizes = SMALL if small else BERT
    config = BertConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = freeze(BertModel(config), "key.bias")  # a softmax does not see it
    for name, module in model.named_modules():
        if name.endswith("output.dense"):
            module.gain = BRANCH_GAIN
    draw(model)
    outputs = ("last_hidden_state", "pooler_output")
    return Case(Plain(model, ("input_ids",), outputs), (sizes.draw_tokens(),))


def hf_gpt2(small: bool = False) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = SMALL if small else GPT2
    config = GPT2Config(
        vocab_size=sizes.vocabulary,
        n_embd=sizes.width,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        n_positions=sizes.tokens,
        initializer_range=sizes.spread,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return _prefill(GPT2LMHeadModel(config), sizes)


def hf_llama_decode(small: bool = False) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    sizes, cached, position = (SMALL, 16, 9) if small else (LLAMA, 512, 300)
    config = LlamaConfig(**sizes.grouped(), max_position_embeddings=cached)
    model = StaticDecoding(LlamaForCausalLM(config), StaticCache(config, max_cache_len=cached))
    return Case(model.eval(), (sizes.draw_tokens(1), torch.tensor([position])))


def hf_qwen3(small: bool = False) -> Case:
    """Heads are wider than width / heads, and have norms of their own before they are rotated."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = SMALL if small else QWEN3
    config = Qwen3Config(
        **sizes.grouped(),
        head_dim=16 if small else 128,
        max_position_embeddings=sizes.tokens,
    )
    return _prefill(Qwen3ForCausalLM(config), sizes)


def hf_t5(small: bool = False) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes, target = (SMALL, 5) if small else (T5, 32)
    config = T5Config(
        vocab_size=sizes.vocabulary,
        d_model=sizes.width,
        d_kv=sizes.width // sizes.heads,
        d_ff=sizes.hidden,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        dropout_rate=0.0,
        use_cache=False,
    )
    inputs = ("input_ids", "decoder_input_ids")
    model = Plain(T5ForConditionalGeneration(config), inputs, ("logits",))
    return Case(model, (sizes.draw_tokens(), sizes.draw_tokens(target)))


def hf_mixtral(small: bool = False) -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes, experts = (SMALL, 4) if small else (MIXTRAL, 8)
    config = MixtralConfig(
        **sizes.grouped(),
        num_local_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=sizes.tokens,
    )
    return _prefill(MixtralForCausalLM(config), sizes)


def hf_mamba(small: bool = False) -> Case:
    from transformers import MambaConfig, MambaForCausalLM

    sizes = SMALL if small else MAMBA
    config = MambaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        state_size=4 if small else 16,
        initializer_range=sizes.spread,
    )
    return _prefill(MambaForCausalLM(config), sizes)


def _prefill(model: torch.nn.Module, sizes: Sizes) -> Case:
    """The logits of the token that comes next."""
    plain = Plain(model, ("input_ids",), ("logits",), use_cache=False, logits_to_keep=1)
    return Case(plain, (sizes.draw_tokens(),))


_NEEDS = ("transformers",)

WORKLOADS = (
    Workload(
        "hf-bert",
        hf_bert,
        "transformers' BERT-base: width 768, 12 layers, 128 tokens",
        needs=_NEEDS,
    ),
    Workload(
        "hf-gpt2",
        hf_gpt2,
        "transformers' GPT-2: width 768, 12 layers, prompt of 256 tokens",
        needs=_NEEDS,
    ),
    Workload(
        "hf-llama-decode",
        hf_llama_decode,
        "transformers' Llama, 153M weights: one token, StaticCache of 512 positions, 300 filled",
        needs=_NEEDS,
        trains=False,
    ),
    Workload(
        "hf-qwen3",
        hf_qwen3,
        "transformers' Qwen3, small: width 1024, 4 layers, heads of 128 with norms, 512 tokens",
        needs=_NEEDS,
    ),
    Workload(
        "hf-t5",
        hf_t5,
        "transformers' T5-small: width 512, 6 + 6 layers, 128 tokens in, logits of 32 out",
        needs=_NEEDS,
    ),
    Workload(
        "hf-mixtral",
        hf_mixtral,
        "transformers' Mixtral, small: width 512, 4 layers, 8 experts of 1024, 128 tokens",
        needs=_NEEDS,
    ),
    Workload(
        "hf-mamba",
        hf_mamba,
        "transformers' Mamba, small: width 512, 4 layers, 16 tokens (its scan is a loop)",
        needs=_NEEDS,
    ),
)
