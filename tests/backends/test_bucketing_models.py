"""Whole models at fifty lengths: a dozen graphs of fixed sizes, outputs as eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from kernel_dispatch.numerics import all_in_double
from tests.models import zoo
from tests.support.bucketing import InBuckets
from tests.support.modules import Of
from tests.support.numerics import assert_contract

pytestmark = pytest.mark.slow

LENGTHS = tuple(range(64, 14, -1))


def text(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, zoo.VOCABULARY, (batch, length))


def mask(length: int, batch: int = 2) -> torch.Tensor:
    kept = torch.randint(1, length + 1, (batch, 1))
    return (torch.arange(length) < kept).long()


def compare(
    model: nn.Module,
    inputs: list[dict[str, torch.Tensor]],
    pick: Callable[[Any], Any] = lambda result: result,
) -> InBuckets:
    backend = InBuckets()
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    wide = copy.deepcopy(model).double()
    for given in inputs:
        with torch.no_grad():
            got, own = pick(compiled(**given)), pick(model(**given))
            doubled = {
                name: one.double() if one.is_floating_point() else one
                for name, one in given.items()
            }
            with all_in_double():
                reference = pick(wide(**doubled))
        sizes = [tuple(one.shape) for one in given.values()]
        assert_contract(got, own, reference, f"{type(model).__name__} at {sizes}")
    assert backend.refusals == []
    assert backend.graphs == 1
    return backend


def logits(result: Any) -> torch.Tensor:
    return result.logits


def test_bert_with_a_mask() -> None:
    """Its table of positions ends between two buckets."""
    config = BertConfig(
        vocab_size=zoo.VOCABULARY,
        hidden_size=zoo.HIDDEN,
        num_hidden_layers=zoo.LAYERS,
        num_attention_heads=zoo.HEADS,
        intermediate_size=2 * zoo.HIDDEN,
        max_position_embeddings=60,
        initializer_range=zoo.SPREAD,
    )
    inputs = [
        {"input_ids": text(length), "attention_mask": mask(length)} for length in range(59, 9, -1)
    ]
    model = BertModel(config).eval()
    backend = compare(model, inputs, lambda result: list(result.to_tuple()))
    assert len(backend.compiled) <= 12
    assert backend.padded >= 40


def test_llama_is_causal() -> None:
    inputs = [{"input_ids": text(length)} for length in LENGTHS]
    backend = compare(zoo.BY_NAME["decoder"].build().eval(), inputs, logits)
    assert len(backend.compiled) <= 12
    assert backend.padded >= 40


def test_llama_with_a_mask_and_batches_that_vary() -> None:
    inputs = [
        {
            "input_ids": text(length, batch),
            "attention_mask": mask(length, batch),
        }
        for length, batch in zip(LENGTHS[::2], (2, 3, 5, 7, 6) * 5, strict=True)
    ]
    model = zoo.BY_NAME["decoder"].build().eval()
    del model.model.layers[1:]  # two layers are in the test above; here the batch is what is new
    backend = compare(model, inputs, logits)
    assert len(backend.compiled) <= 16
    assert backend.padded >= 15


def test_vit_with_batches_that_vary() -> None:
    inputs = [
        {"pixel_values": torch.randn(batch, 3, zoo.IMAGE, zoo.IMAGE)} for batch in range(24, 2, -1)
    ]
    model = zoo.BY_NAME["vision_transformer"].build().eval()
    del model.vit.layers[1:]  # no padding gets from one example to another, however deep it is
    backend = compare(model, inputs, logits)
    assert len(backend.compiled) <= 7


def _cnn(self: Any, ids: torch.Tensor) -> torch.Tensor:
    x = self.table(ids).transpose(1, 2)
    towers = [F.relu(tower(x)).amax(-1) for tower in (self.narrow, self.wide)]
    return self.head(torch.cat(towers, 1))


def test_a_cnn_of_text() -> None:
    parts = {
        "table": nn.Embedding(zoo.VOCABULARY, 16),
        "narrow": nn.Conv1d(16, 24, 3, padding=1),
        "wide": nn.Conv1d(16, 24, 5, stride=2),
        "head": nn.Linear(48, 5),
    }
    backend = compare(_Named(_cnn, parts), [{"ids": text(length)} for length in LENGTHS])
    assert len(backend.compiled) <= 12


def _mean(self: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x = self.encoder(self.table(ids))
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) + x.mean(1) + x.std(1)


def _last(self: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x = self.encoder(self.table(ids))
    marked = x[torch.arange(x.shape[0]), mask.sum(1) - 1]
    return marked + x[:, -1] + x[:, -2:].sum(1)


@pytest.mark.parametrize("pool", [_mean, _last])
def test_pooling(pool: Callable[..., torch.Tensor]) -> None:
    parts = {
        "table": nn.Embedding(zoo.VOCABULARY, 16),
        "encoder": nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16)),
    }
    inputs = [{"ids": text(length), "mask": mask(length)} for length in LENGTHS]
    backend = compare(_Named(pool, parts), inputs)
    assert len(backend.compiled) <= 12
    assert backend.padded >= 40


def test_a_step_of_decoding_with_keys_of_earlier_ones() -> None:
    def step(self: Any, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Any:
        query, key, value = (
            part.view(2, 1, 2, 8).transpose(1, 2) for part in self.project(x).chunk(3, -1)
        )
        keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        return F.scaled_dot_product_attention(query, keys, values), keys, values

    inputs = [
        {
            "x": torch.randn(2, 1, 16),
            "keys": torch.randn(2, 2, length, 8),
            "values": torch.randn(2, 2, length, 8),
        }
        for length in LENGTHS
    ]
    for given in inputs:
        for name, one in given.items():
            for dim in range(one.ndim):
                if (name, dim) not in (("keys", 2), ("values", 2)):
                    torch._dynamo.mark_static(one, dim)
    backend = compare(_Named(step, {"project": nn.Linear(16, 48)}), inputs)
    assert len(backend.compiled) <= 12


class _Named(Of):
    """As `Of`, called by the names of its inputs."""

    def __init__(self, function: Callable[..., Any], parts: dict[str, nn.Module]) -> None:
        super().__init__(function, **parts)

    def forward(self, **given: Any) -> Any:
        return self.function(self, **given)
