"""`generate` of a Hugging Face model: the same tokens as eager, and how often it compiled.

A growing cache and a static one, each with the model's own `generate`. Llama with random weights
from its config: nothing is downloaded.

- `model.compile(backend="unified")` compiles the model in place. `torch.compile(model, ...)`
  returns another object, whose `generate` is the original's and calls the original, which is not
  compiled: its report is empty, as this example shows.
- A growing cache costs one graph for the prompt and two for the tokens: one for the first sizes,
  and one for all sizes, once torch has seen that they change. A static cache costs one and one.
- On a GPU, `generate(cache_implementation="static")` compiles the tokens' part by itself, with
  Inductor. To have it done here: `compile_config=CompileConfig(backend="unified", mode=None)`;
  without `mode=None` it asks for "reduce-overhead", which is O3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kernel_dispatch


@dataclass(frozen=True)
class Row:
    """One way to generate: was it right, and what did it cost?"""

    name: str
    same_tokens: bool
    graphs: int  # compiled for the first text
    more_graphs: int  # compiled for a second text of the same length: should be none
    runs: int


def make_model(layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.15,  # wide enough that every layer has a say in the next token
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def write(
    model: LlamaForCausalLM, prompt: torch.Tensor, tokens: int, cache: str | None
) -> torch.Tensor:
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        cache_implementation=cache,
    )


def compare(
    name: str,
    cache: str | None,
    level: str,
    tokens: int,
    layers: int,
    in_place: bool = True,
) -> Row:
    """The same two prompts through eager and through a model that was compiled one way."""
    prompts = [torch.randint(2, 256, (1, 8)) for _ in range(2)]
    plain = make_model(layers)
    expected = [write(plain, prompt, tokens, cache) for prompt in prompts]

    torch.compiler.reset()
    model = make_model(layers)
    if in_place:
        model.compile(backend="unified", options={"level": level})
    else:
        model = torch.compile(model, backend="unified", options={"level": level})
    written = [write(model, prompts[0], tokens, cache)]
    graphs = len(kernel_dispatch.report())
    written.append(write(model, prompts[1], tokens, cache))

    report = kernel_dispatch.report()
    if in_place:
        print(f"\n{name}\n{report}")
    return Row(
        name,
        all(torch.equal(mine, eagers) for mine, eagers in zip(written, expected, strict=True)),
        graphs,
        len(report) - graphs,
        sum(graph.runs for graph in report),
    )


def main(level: str = "O2", tokens: int = 16, layers: int = 2) -> list[Row]:
    rows = [
        compare("growing cache", None, level, tokens, layers),
        compare("static cache", "static", level, tokens, layers),
        compare("torch.compile(model).generate", None, level, tokens, layers, in_place=False),
    ]
    for row in rows:
        same = "the same tokens as eager" if row.same_tokens else "OTHER TOKENS THAN EAGER"
        print(
            f"{row.name}: {same}; {row.graphs} graphs, {row.more_graphs} more for a second "
            f"prompt, {row.runs} runs"
        )
    return rows


if __name__ == "__main__":
    main()
