"""Run by torchrun on every rank: which machine profile does a job use? Usage: worker.py CASE FOLDER

Every rank has a cache folder of its own, as on machines of their own. Exits non-zero with the
reason when ranks disagree or one of them measures.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from kernel_dispatch import calibration
from kernel_dispatch.settings import Settings
from lowering import measuring
from lowering.profile import MachineProfile, RateKey


def store(folder: Path, rank: int) -> None:
    """A profile that tells whose it is."""
    rates = {RateKey("gemm", "mkl", "float32", "large"): float(rank + 1)}
    profile = MachineProfile(measuring.conditions(), rates, date=f"rank {rank}")
    folder.mkdir(parents=True)
    path = calibration.path_of(folder, profile.conditions)
    path.write_text(json.dumps(profile.as_dict()))


def refuse(*_: object) -> MachineProfile:
    raise AssertionError("a rank measured")


def main() -> None:
    case, base = sys.argv[1], Path(sys.argv[2])
    measuring.measure, measuring.glance = refuse, refuse  # type: ignore[assignment]
    rank = int(os.environ["RANK"])
    settings = Settings(cache_dir=str(base / f"rank{rank}"), calibration="auto")
    if case in ("all_have_one", "late") or (case == "only_others" and rank):
        store(settings.cache_folder, rank)
    before = calibration.find(settings, auto=True)
    assert before.profile is None, "no rank decides before there is a group"
    dist.init_process_group("gloo")
    if case == "late":
        calibration._RANK_0_S = 0.2
        if rank == 0:
            time.sleep(2)
    answer = calibration.find(settings, auto=True)
    assert calibration.find(settings, auto=True) is answer
    told = [answer.profile.date if answer.profile else "none", answer.note]
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, told)
    assert {date for date, _ in everyone} == {everyone[0][0]}, everyone
    if rank == 0:
        print(f"ok {case}: {everyone}")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as in worker.py


if __name__ == "__main__":
    main()
