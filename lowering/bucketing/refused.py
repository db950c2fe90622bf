"""How a rule says no: one sentence, which `plan` turns into a Reason with the user's line."""

from __future__ import annotations

from torch import fx


class Refused(Exception):
    """The graph is not proven to keep its numbers when it is padded. Never leaves the package."""

    def __init__(self, text: str, node: fx.Node | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.node = node
