"""The demo: a real transformer, eager against Inductor against `unified` O0-O3, and the report.

BERT of base width with 4 layers and random weights from its config; nothing is downloaded.
"""

from __future__ import annotations

import copy
import sys

import torch

import kernel_dispatch
from benchmarks import contenders as arena


def bert(layers: int = 4) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=layers)
    model = BertModel(config, add_pooling_layer=False).eval()
    return LastHiddenState(model), (torch.randint(0, config.vocab_size, (1, 128)),)


class LastHiddenState(torch.nn.Module):
    """A model that returns one tensor, which is easier to compare than an output object."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens).last_hidden_state


def main() -> int:
    model, inputs = bert()
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; BERT base width, 4 layers,"
    )
    print("128 tokens, batch 1, float32, inference. Compiling (a minute or two) ...\n", flush=True)
    with torch.no_grad():
        reference = copy.deepcopy(model).double()(*inputs)
        contenders = arena.make(model)
        outputs = arena.first_calls(contenders, inputs)
        for contender, output in zip(contenders, outputs, strict=True):
            contender.error = arena.relative_error(output, reference)
        arena.time_interleaved(contenders, inputs, rounds=15)
    print(arena.table(contenders))
    print(
        "\nMedians of 15 interleaved rounds; error is the largest one against float64, relative.\n"
    )
    print(kernel_dispatch.report(contenders[-2].run).text(verbose=True))
    eager = contenders[0].error
    eps = torch.finfo(torch.float32).eps
    broken = [c.name for c in contenders if c.error > 2 * eager + 4 * eps]
    if broken:
        print(f"\nThe numerics contract is broken by: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
