"""A graph that was proven to keep its numbers when it is padded, and its form for any bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from lowering.bucketing.bucket import Bucket
from lowering.bucketing.inputs import Inputs, Sizes
from lowering.bucketing.interpreter import Interpreter
from lowering.bucketing.outputs import Outputs
from lowering.bucketing.sizes import next_size

Key = tuple[int, ...]


class Bucketing:
    """Made by `plan`. `symbols` are the sizes that vary, in the order of a key's numbers."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._inputs = Inputs(module)
        self._sized = self._inputs.symbols_of_sizes(module)
        self._outputs = Outputs(module, self._inputs)

    def try_out(self) -> None:
        """Run every rule without data, in a bucket that is larger than what was traced."""
        sources = self._inputs.sources
        key = tuple(next_size(sources[symbol].hint + 1) for symbol in self._inputs.symbols)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            self._outputs.learn(self._interpret(key, self._inputs.fakes(self._sizes(key))))

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(map(str, self._inputs.symbols))

    def key(self, args: Sequence[Any], sizes: Sequence[int] | None = None) -> Key:
        """The bucket that these inputs fall into."""
        true = self._inputs.true_sizes(args)
        return tuple(
            next_size(true[symbol], sizes) if symbol in self._sized else 1
            for symbol in self._inputs.symbols
        )

    def pad(self, args: Sequence[Any], key: Key) -> list[Any]:
        """The tensors of `args` (no numbers) in the bucket's sizes, then a 0-d tensor for each of
        `symbols`. The caller's tensors are not changed; parameters are the same objects."""
        return self._inputs.padded(args, self._sizes(key))

    def at(self, key: Key) -> fx.GraphModule:
        """The graph for one bucket: fixed sizes only. Takes what `pad` gives."""
        from torch._dynamo import config as dynamo_config
        from torch._guards import tracing
        from torch.fx.experimental.proxy_tensor import make_fx

        def run(*inputs: Any) -> list[torch.Tensor]:
            return self._outputs.computed(self._interpret(key, inputs))

        # Traced in the middle of a user's call: meanwhile, compiled functions in other threads run
        # as plain Python. By default they would raise.
        others = dynamo_config.patch(error_on_nested_fx_trace=False)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with others, tracing(None), fake, torch.no_grad():
            inputs = self._inputs.fakes(self._sizes(key))
            with fx.traceback.preserve_node_meta():
                return make_fx(run)(*inputs)

    def crop(self, outputs: Sequence[Any], args: Sequence[Any], key: Key) -> tuple[Any, ...]:
        """The outputs of `at(key)` as the original graph would have given them for `args`."""
        true = self._inputs.true_sizes(args)
        return self._outputs.cropped(outputs, args, true, self._sizes(key))

    def _sizes(self, key: Key) -> Sizes:
        return dict(zip(self._inputs.symbols, key, strict=True))

    def _interpret(self, key: Key, inputs: Sequence[Any]) -> list[Any]:
        count = len(inputs) - len(key)
        lengths = dict(zip(self._inputs.symbols, inputs[count:], strict=True))
        results: list[Any] = Interpreter(self._module, Bucket(self._sizes(key), lengths)).run(
            *inputs[:count]
        )
        return results
