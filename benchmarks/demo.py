"""The demo: a real transformer, eager against Inductor against `unified` O0-O3, and the report.

BERT of base width with 4 layers and random weights from its config; nothing is downloaded.
"""

from __future__ import annotations

import sys

import torch

from kernel_dispatch.bench import contenders
from kernel_dispatch.bench.progress import Progress
from kernel_dispatch.bench.session import Session, Wish
from kernel_dispatch.bench.views import table
from kernel_dispatch.settings import list_levels
from kernel_dispatch.terminal import style_of, write


def bert(layers: int = 4) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    from transformers import BertConfig, BertModel

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
    write("BERT base width, 4 layers, 128 tokens, batch 1. Compiling takes a minute or two.")
    wish = Wish(
        targets=["benchmarks.demo:bert"],
        contenders=contenders.chosen(["inductor", "unified"], list_levels()),
        second_process=False,
    )
    progress = Progress()
    with Session(wish, progress) as session:
        run = session.run()
    progress.done()
    (default,) = [row for row in run.rows if row.contender == "unified-O2"]
    write(table.text(run, style_of(sys.stdout)))
    write(f"\nWhat unified did at O2:\n\n{default.report}")
    return int(any(row.status != "ok" for row in run.rows))


if __name__ == "__main__":
    sys.exit(main())
