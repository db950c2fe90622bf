"""nn.TransformerEncoderLayer calls one opaque operator in inference; its parts are regions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import kernel_dispatch
from tests.support.compiling import compile_at
from tests.support.numerics import assert_contract


def encoder(**kwargs: object) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, **kwargs)  # type: ignore[arg-type]
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms that are not their initial ones
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


@pytest.mark.parametrize("kwargs", [{}, {"norm_first": True, "activation": "gelu"}], ids=str)
def test_an_encoder_is_taken_apart(kwargs: dict[str, object]) -> None:
    model, x = encoder(**kwargs), torch.randn(2, 33, 64)
    compiled = compile_at("O2", model)
    with torch.no_grad():
        reference = copy.deepcopy(model).double()(x.double())
        assert_contract(compiled(x), model(x), reference, "encoder")
    (graph,) = kernel_dispatch.report(compiled)
    found = {(row["region"], row["provider"]): row["count"] for row in graph.as_dict()["regions"]}
    found.pop(("graph", "inductor"))
    assert sum(count for (region, _), count in found.items() if region == "linear") == 8
    assert found.get(("attention", "mha"), 2) == 2
    assert not graph.fallbacks


def test_masks_stay_with_torchs_own_operator() -> None:
    model, x = encoder(), torch.randn(2, 33, 64)
    mask = torch.zeros(2, 33, dtype=torch.bool)
    mask[0, 20:] = True
    compiled = compile_at("O2", model)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=mask)
        got = compiled(x, src_key_padding_mask=mask)
    torch.testing.assert_close(got[~mask], expected[~mask], rtol=1e-4, atol=1e-5)
    assert not any(graph.fallbacks for graph in kernel_dispatch.report(compiled))
