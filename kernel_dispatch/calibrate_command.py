"""`calibrate`: measure this machine, store the profile, print it.

Torch is imported only once the command runs, as in cli.py.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kernel_dispatch.terminal import Style, style_of, write, write_json

if TYPE_CHECKING:
    from kernel_dispatch.calibration import Answer
    from lowering.profile import MachineProfile

COMMAND = "python -m kernel_dispatch calibrate"
DESCRIPTION = """Measure this machine once: products and convolutions by every library that torch
has here, memory bandwidth, the overhead of a call. The profile is stored in the cache folder
(UNIFIED_CACHE_DIR) and used from the next process on; run it while the machine is idle.

It holds for this CPU, torch and thread count (UNIFIED_THREADS, else torch's)."""

_LONGEST_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", type=_seconds, metavar="S", help="seconds to take (default: 3)")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds up to {_LONGEST_S}")
    return value


def run(args: argparse.Namespace) -> int:
    from kernel_dispatch import calibration
    from lowering.measuring import BUDGET_S

    answer = calibration.calibrate(args.budget or BUDGET_S)
    assert answer.profile is not None, "calibrate() always measures"
    if args.json:
        stored = str(answer.path) if answer.path else None
        write_json({"profile": answer.profile.as_dict(), "stored": stored, "note": answer.note})
    else:
        write(render(answer, style_of(sys.stdout)))
    return int(answer.path is None)


def render(answer: Answer, style: Style) -> str:
    profile = answer.profile
    assert profile is not None
    where = profile.conditions
    lines = [
        f"{style.bold(where.cpu)}: {where.cores} cores, {where.threads} threads, torch "
        f"{where.torch}; measured in {profile.seconds:.1f} s",
        *_rates(profile, style),
        "",
        f"memory  {bandwidths(profile)}",
        f"call    {profile.call_us:.1f} us for one op on one element",
        "",
        *(f"{style.mark('info')} {note}" for note in profile.notes),
    ]
    if profile.disturbed:
        lines.append(f"{style.mark('warn')} {disturbance(profile)}")
    if answer.path is None:
        return "\n".join([*lines, f"{style.mark('problem')} {answer.note}"])
    return "\n".join([*lines, f"{style.mark('ok')} stored in {answer.path}"])


def bandwidths(profile: MachineProfile) -> str:
    if not profile.read_gbs:
        return "not measured"
    return f"read {profile.read_gbs:.1f} GB/s, copy {profile.copy_gbs:.1f} GB/s"


def disturbance(profile: MachineProfile) -> str:
    return (
        f"other processes took {profile.busy:.0%} of the time meanwhile: the rates say little; "
        f"measure again when the machine is idle"
    )


def _rates(profile: MachineProfile, style: Style) -> Iterator[str]:
    """A block per kind, a line per dtype and provider, a column per shape; the fastest in bold."""
    from lowering.profile import SHAPES, RateKey

    titles = {"gemm": "products", "conv": "convolutions"}
    for kind, shapes in SHAPES.items():
        seen = dict.fromkeys((k.dtype, k.provider) for k in profile.rates if k.kind == kind)
        if not seen:
            continue
        head = f"{titles.get(kind, kind) + ', GFLOP/s':<34}"
        yield ""
        yield style.bold(head + "".join(f"{shape:>12}" for shape in shapes))
        for dtype, provider in seen:
            cells = ""
            for shape in shapes:
                rate = profile.rates.get(RateKey(kind, provider, dtype, shape))
                best = profile.faster(kind, dtype, shape)[:1] == [provider]
                text = "-" if rate is None else f"{rate:.1f}{'*' if best else ' '}"
                cells += style.bold(f"{text:>12}") if best else f"{text:>12}"
            yield f"  {dtype:<16}{provider:<16}{cells}"
    if profile.rates:
        yield "* the fastest of its dtype and shape"
