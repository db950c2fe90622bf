"""Hugging Face's Trainer with `unified`: compile before the Trainer gets the model.

- `model.compile(backend="unified")` compiles in place: the Trainer sees the class that it knows,
  reads the names of its inputs, and saves it as always. This is the way.
- `torch.compile(model, backend="unified")` works too, with `remove_unused_columns=False`: the
  wrapper's `forward(*args, **kwargs)` names no inputs, so the Trainer would drop every column.
- `torch.compiler.set_default_backend("unified")` and a bare `model.compile()` do the same as the
  first, in programs whose call of `compile` one cannot change.
- `TrainingArguments(torch_compile_backend="unified")` does not work: accelerate takes the backends
  of a list of its own, whatever torch knows. `torch_compile=True` alone does not help either: then
  accelerate asks for Inductor by name, and torch's default backend has no say.

A tiny Llama with random weights learns sequences that count upwards: nothing is downloaded. Needs
accelerate, as every use of the Trainer does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

import kernel_dispatch

VOCABULARY = 64


class Counting(Dataset):
    """Sequences n, n+1, n+2, ... from a random start."""

    def __init__(self, examples: int = 64, length: int = 16) -> None:
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(VOCABULARY, (examples, 1), generator=generator)
        self.sequences = (starts + torch.arange(length)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.sequences[index], "labels": self.sequences[index]}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def train(model: torch.nn.Module, steps: int, **arguments: Any) -> list[float]:
    """The loss of every step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=8,
                learning_rate=5e-3,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                dataloader_pin_memory=torch.accelerator.is_available(),
                seed=0,
                **arguments,
            ),
            train_dataset=Counting(),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def compiled_in_place(steps: int, level: str) -> list[float]:
    model = make_model()
    model.compile(backend="unified", options={"level": level})
    return train(model, steps)


def compiled_as_a_wrapper(steps: int, level: str) -> list[float]:
    model = torch.compile(make_model(), backend="unified", options={"level": level})
    return train(model, steps, remove_unused_columns=False)


def compiled_by_default(steps: int, level: str) -> list[float]:
    """Options cannot be given this way: the level comes from `configure`, or from UNIFIED_LEVEL."""
    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("unified")
    try:
        with kernel_dispatch.configure(level=level):
            model = make_model()
            model.compile()
            return train(model, steps)
    finally:
        torch.compiler.set_default_backend(before)


def named_to_accelerate() -> str:
    """What accelerate says to a backend that is not on its list; empty where it takes it."""
    try:
        train(make_model(), 1, torch_compile=True, torch_compile_backend="unified")
    except ValueError as refused:
        return str(refused)
    return ""


@dataclass(frozen=True)
class Outcome:
    """Each way's losses and how many graphs it compiled; and what accelerate refuses with."""

    losses: dict[str, list[float]]
    graphs: dict[str, int]
    refusal: str


def main(steps: int = 8, level: str = "O2") -> Outcome:
    ways: dict[str, Callable[[int, str], list[float]]] = {
        "model.compile": compiled_in_place,
        "torch.compile": compiled_as_a_wrapper,
    }
    if hasattr(torch.compiler, "set_default_backend"):  # newer torches have it
        ways["set_default_backend"] = compiled_by_default
    losses = {"eager": train(make_model(), steps)}
    graphs = {}
    for name, way in ways.items():
        torch.compiler.reset()
        losses[name] = way(steps, level)
        report = kernel_dispatch.report()
        graphs[name] = len(report)
        print(f"\n{name}\n{report}")
    refusal = named_to_accelerate()
    print()
    for name, values in losses.items():
        print(f"{name}: loss {values[0]:.4f} -> {values[-1]:.4f}")
    print(f"TrainingArguments(torch_compile_backend='unified'): {refusal or 'accepted'}")
    return Outcome(losses, graphs, refusal)


if __name__ == "__main__":
    main()
