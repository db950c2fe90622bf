"""What a call of the script was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CPU_NOTE = "cpu, not a measurement"


@dataclass(frozen=True)
class Settings:
    command: str
    json: Path
    device: str = "cuda"
    quick: bool = False
    only: tuple[str, ...] = ()  # parts of the keys of rows
    dtypes: tuple[str, ...] = ()  # none: what the command usually does
    without: tuple[str, ...] = ()  # contenders to leave out
    seconds: float = 570.0
    row_seconds: float = 150.0
    retry: bool = False
    tuned: Path | None = None  # instead of the folder where `unified` keeps its cache

    def wants(self, key: str) -> bool:
        return not self.only or any(part in key for part in self.only)

    @property
    def measures(self) -> bool:
        return self.device != "cpu"
