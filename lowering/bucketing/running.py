"""A graph in buckets as one callable: pad, find or compile the bucket's graph, run, crop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from lowering.bucketing.bucketing import Bucketing, Key
from lowering.contract import Graph

Compile = Callable[[fx.GraphModule, Sequence[Any]], Graph]


class Bucketed:
    """Called with the original graph's inputs. `compiled` has one entry for each bucket so far."""

    def __init__(
        self, bucketing: Bucketing, compile: Compile, sizes: Sequence[int] | None = None
    ) -> None:
        self._bucketing = bucketing
        self._compile = compile
        self._sizes = sizes
        self.compiled: dict[Key, Graph] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        key = self._bucketing.key(args, self._sizes)
        padded = self._bucketing.pad(args, key)
        if key not in self.compiled:
            with self._lock:
                if key not in self.compiled:
                    self.compiled[key] = self._compile(self._bucketing.at(key), padded)
        return self._bucketing.crop(self.compiled[key](*padded), args, key)
