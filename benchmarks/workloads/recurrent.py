"""Models with recurrent layers: a reader of text lines (a CRNN) and a forecaster of time series."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules import rnn

from benchmarks.workloads.initial_weights import RELU_GAIN, draw
from kernel_dispatch.bench import Case, Workload


@dataclass(frozen=True)
class Line:
    """A picture of one line of text, as wide as its text; `pools` is by how much each stage
    narrows height and width."""

    height: int = 32
    width: int = 160
    channels: tuple[int, ...] = (64, 128, 256, 256, 512)
    pools: tuple[tuple[int, int], ...] = ((2, 2), (2, 2), (2, 1), (2, 1), (2, 1))
    hidden: int = 256
    letters: int = 37


LINE = Line()
SMALL_LINE = Line(8, 16, channels=(4, 8, 8), pools=((2, 2), (2, 2), (2, 1)), hidden=6, letters=5)


class Reader(nn.Module):
    """Convolutions down to one row, two layers of LSTM along it, a letter for each place."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        stages, inside = [], 1
        for outside, pool in zip(line.channels, line.pools, strict=True):
            stages += [
                nn.Conv2d(inside, outside, 3, padding=1, bias=False),
                nn.BatchNorm2d(outside),
            ]
            stages += [nn.ReLU(), nn.MaxPool2d(pool)]
            inside = outside
        self.look = nn.Sequential(*stages)
        self.read = nn.LSTM(inside, line.hidden, num_layers=2, bidirectional=True)
        self.letters = nn.Linear(2 * line.hidden, line.letters)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        places = self.look(picture).squeeze(2).permute(2, 0, 1)
        read, _ = self.read(places)
        return torch.log_softmax(self.letters(read), dim=-1)


@dataclass(frozen=True)
class Series:
    values: int = 8
    steps: int = 96
    hidden: int = 64
    ahead: int = 24
    batch: int = 32


SERIES = Series()
SMALL_SERIES = Series(3, steps=7, hidden=5, ahead=4, batch=4)


class Forecaster(nn.Module):
    """Two layers of GRU over what was seen; what comes is told from the last state."""

    def __init__(self, series: Series) -> None:
        super().__init__()
        # torch_xla replaces `nn.GRU`, also when accelerate imports it: its own knows no CPU.
        self.follow = rnn.GRU(series.values, series.hidden, num_layers=2, batch_first=True)
        self.tell = nn.Sequential(
            nn.Linear(series.hidden, series.hidden),
            nn.ReLU(),
            nn.Linear(series.hidden, series.ahead),
        )

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        followed, _ = self.follow(seen)
        return self.tell(followed[:, -1])


def text_reader(small: bool = False) -> Case:
    line = SMALL_LINE if small else LINE
    return Case(draw(Reader(line), RELU_GAIN), (torch.randn(1, 1, line.height, line.width),))


def forecaster(small: bool = False) -> Case:
    series = SMALL_SERIES if small else SERIES
    seen = torch.randn(series.batch, series.steps, series.values)
    return Case(draw(Forecaster(series), RELU_GAIN), (seen,))


WORKLOADS = (
    Workload(
        "text-reader",
        text_reader,
        "CRNN: 5 convolutions on a line of 32x160, 2 layers of LSTM of 256 both ways, 37 letters",
    ),
    Workload(
        "forecaster",
        forecaster,
        "2 layers of GRU of 64, 96 steps of 8 numbers, batch of 32, 24 numbers ahead",
    ),
)
