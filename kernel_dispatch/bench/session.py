"""One benchmark run: every contender in a process of its own, interleaved by this one.

Per workload: the baseline establishes the truth; each contender builds, is verified and warms up; a
second process measures what the caches are worth; then rounds, each of which calls every contender
once in a fresh order. Rounds alternate between the two processes of each contender: the same code
in another process, with its memory elsewhere, differs by a few percent, and the intervals have to
know.
Whatever fails becomes a row with its reason.
"""

from __future__ import annotations

import datetime
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kernel_dispatch.bench import estimates, roofline, surroundings
from kernel_dispatch.bench.client import Client, Refusal
from kernel_dispatch.bench.contender import Contender
from kernel_dispatch.bench.results import BASELINE, Compilation, Limits, Numerics, Row, Run
from lowering.errors import SettingError

MIN_ROUNDS, MAX_ROUNDS = 8, 60
# Threads of whoever was called before look for more work for so long (OpenMP's 10 ms, those of ONNX
# Runtime 40), on the cores that the next one needs.
SETTLE_S = 0.06


@dataclass(frozen=True)
class Wish:
    """What to run, and how."""

    targets: Sequence[str]
    contenders: Sequence[Contender]  # the baseline first
    devices: Sequence[str] = ("cpu",)
    dtype: str | None = None  # None: as the workload is built
    threads: int | None = None  # None: torch's own choice
    training: bool = False
    seed: int = 0
    seconds_per_row: float = 2.0  # of timing, for each contender of a workload
    second_process: bool = True
    timeout_s: float = 900.0


@dataclass
class _Entry:
    """A contender on its way through one workload."""

    client: Client
    row: Row
    timed: list[Client] = field(default_factory=list)  # the processes that take turns
    samples: list[float] = field(default_factory=list)
    calls: int = 1
    call_s: float = 0.0

    @property
    def alive(self) -> bool:
        return self.row.status == "ok"

    def refused(self, refusal: Refusal) -> None:
        # A mistake that shows only now must not cost the rows that were measured before it.
        status = "failed" if refusal.status == "usage" else refusal.status
        self.row = replace(self.row, status=status, reason=refusal.reason, times=None)


def _mistake(refusal: Refusal) -> SettingError:
    return SettingError(refusal.reason.split(": ", 1)[-1])


Progress = Callable[[str, float], None]  # what is being done, and the share that is done


class Session:
    """Use as a context manager: it owns processes and temporary folders."""

    def __init__(self, wish: Wish, progress: Progress = lambda text, share: None) -> None:
        self._wish = wish
        self._progress = progress
        self._folder = tempfile.TemporaryDirectory(prefix="kernel-dispatch-bench-")
        self._clients: dict[tuple[str, str, bool], Client] = {}
        self._limits: dict[tuple[str, str], Limits] = {}
        self._stages_done = 0
        self._commit = surroundings.commit()  # now: the checkout may change while this runs

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.stop()
        self._folder.cleanup()

    def run(self) -> Run:
        start, started = time.perf_counter(), datetime.datetime.now(datetime.timezone.utc)
        self._find_targets()
        rows, left_out = self._workloads()
        return Run(
            # Only now, since the limits are the best of what was measured at every workload.
            rows=tuple(self._with_roofline(row, found) for row, found in rows),
            baseline=BASELINE,
            machine=surroundings.machine(self._wish.threads),
            commit=self._commit,
            limits=next(iter(self._limits.values()), Limits()),
            started=started.isoformat(timespec="seconds"),
            seconds=time.perf_counter() - start,
            settings=self._settings() | ({"left_out": left_out} if left_out else {}),
        )

    def _workloads(self) -> tuple[list[tuple[Row, dict[str, Any]]], list[str]]:
        """What was measured, and what was not because somebody interrupted: the workload in hand,
        and all behind it. Minutes of measuring before that are not lost."""
        wish = self._wish
        rows: list[tuple[Row, dict[str, Any]]] = []
        left = [(device, target) for device in wish.devices for target in wish.targets]
        while left:
            device, target = left[0]
            try:
                rows += self._workload(target, device)
            except KeyboardInterrupt:
                if not rows:
                    raise
                break
            del left[0]
        return rows, list(dict.fromkeys(target for _, target in left))

    def _find_targets(self) -> None:
        """The user's own modules are imported by a worker, not by this process."""
        baseline = self._client(self._wish.contenders[0], self._wish.devices[0], second=False)
        for target in self._wish.targets:
            if ":" in target:
                try:
                    baseline.start()
                    baseline.ask("find", target=target)
                except Refusal as refusal:
                    if refusal.status == "usage":
                        raise _mistake(refusal) from None

    def _settings(self) -> dict[str, Any]:
        wish = self._wish
        return {
            "seed": wish.seed,
            "seconds_per_row": wish.seconds_per_row,
            "gradients": wish.training,
            "dtype": wish.dtype or "as built",
            "devices": list(wish.devices),
            "threads": wish.threads or "torch's default",
            "second_process": wish.second_process,
            "confidence": estimates.CONFIDENCE,
        }

    # --- one workload -----------------------------------------------------------------------------

    def _workload(self, target: str, device: str) -> list[tuple[Row, dict[str, Any]]]:
        entries = [self._entry(contender, target, device) for contender in self._wish.contenders]
        baseline = entries[0]
        truth = os.path.join(self._folder.name, "truth.pt")
        found: dict[str, Any] = {}
        for entry in entries:
            self._say(f"{target}: {entry.row.contender} compiles")
            if entry is baseline:
                self._attempt(entry, lambda: found.update(self._establish(baseline, truth)))
                if not baseline.alive:
                    _stop_all(entries, baseline.row)
                    break
            self._attempt(entry, lambda e=entry: self._get_ready(e, truth, found))  # type: ignore[misc]
        for entry in entries if self._wish.second_process else ():
            self._say(f"{target}: {entry.row.contender} in a second process")
            self._attempt(entry, lambda e=entry: self._second_process(e, device, truth))  # type: ignore[misc]
        self._say(f"{target}: timing")
        self._rounds([entry for entry in entries if entry.alive])
        for entry in entries:
            self._attempt(entry, lambda e=entry: self._finish(e))  # type: ignore[misc]
        return [(self._finished_row(entry, baseline), found) for entry in entries]

    def _entry(self, contender: Contender, target: str, device: str) -> _Entry:
        row = Row(
            workload=target,
            contender=contender.name,
            status="ok",
            device=device,
            training=self._wish.training,
            summary=contender.summary,
        )
        return _Entry(self._client(contender, device, second=False), row)

    def _client(self, contender: Contender, device: str, second: bool) -> Client:
        key = (contender.name, device, second)
        if key not in self._clients:
            hello = {"threads": self._wish.threads, "device": device}
            # Numbered: a name may be the path of a user's file.
            number = self._wish.contenders.index(contender)
            caches = os.path.join(self._folder.name, f"{number}-{device}".replace(":", "-"))
            client = Client(contender, hello, caches, self._wish.timeout_s)
            self._clients[key] = client
        return self._clients[key]

    def _attempt(self, entry: _Entry, act: Callable[[], None]) -> None:
        if not entry.alive:
            return
        try:
            act()
        except Refusal as refusal:
            entry.refused(refusal)

    def _build(self, entry: _Entry, client: Client) -> dict[str, Any]:
        client.start()
        wish = self._wish
        return client.ask(
            "build",
            target=entry.row.workload,
            seed=wish.seed,
            dtype=wish.dtype,
            training=wish.training,
        )

    def _establish(self, baseline: _Entry, truth: str) -> dict[str, Any]:
        client = baseline.client
        built = self._build(baseline, client)
        key = (baseline.row.device, built["dtype"])
        self._limits[key] = _better(self._limits.get(key), _measured_limits(client, key[1]))
        established = client.ask("establish", path=truth)
        # Once more: as fresh as the others' cases, its state and its memory.
        _demand_equal(built, self._build(baseline, client))
        return {**built, **established, "limits": key}

    def _get_ready(self, entry: _Entry, truth: str, found: dict[str, Any]) -> None:
        client = entry.client
        built = self._build(entry, client) if entry.row.contender != BASELINE else found
        entry.row = replace(
            entry.row,
            dtype=found["dtype"],
            group=found["group"],
            version=client.about["version"],
            reason=found["note"],
        )
        _demand_equal(found, built)
        prepare_s = client.ask("prepare")["seconds"]
        first = client.ask("first_call", path=truth)
        if first["numerics"] is not None:
            entry.row = replace(entry.row, numerics=Numerics(**first["numerics"]))
        entry.row = replace(
            entry.row, reason="; ".join(filter(None, [found["note"], first["note"]]))
        )
        warm = client.ask("warm_up")
        entry.timed = [client]
        entry.calls, entry.call_s = warm["calls"], warm["seconds"]
        entry.row = replace(
            entry.row,
            compilation=Compilation(
                first_call_s=first["seconds"], prepare_s=prepare_s, recompiles=warm["recompiles"]
            ),
        )

    def _second_process(self, entry: _Entry, device: str, truth: str) -> None:
        """What a deployment sees after a restart; from now on the two take turns.

        Verified like the first one: what came out of a cache may be another's.
        """
        client = self._client(entry.client.contender, device, second=True)
        self._build(entry, client)
        client.ask("prepare")
        seconds = client.ask("first_call", path=truth)["seconds"]
        client.ask("warm_up")
        entry.timed.append(client)
        compilation = replace(entry.row.compilation, second_process_s=seconds)
        entry.row = replace(entry.row, compilation=compilation)

    # --- timing -----------------------------------------------------------------------------------

    def _rounds(self, entries: list[_Entry]) -> None:
        if not entries:
            return
        shuffle = random.Random(self._wish.seed).shuffle
        for turn in range(self._count(entries)):
            order = [entry for entry in entries if entry.alive]
            shuffle(order)
            for entry in order:
                time.sleep(SETTLE_S)
                try:
                    process = entry.timed[turn % len(entry.timed)]
                    entry.samples.append(process.ask("time", calls=entry.calls)["seconds"])
                except Refusal as refusal:
                    entry.refused(refusal)

    def _count(self, entries: list[_Entry]) -> int:
        """Rounds within the budget, which is for all contenders together: a slow one gets its share
        of the rounds, not of the seconds."""
        a_round = sum(entry.call_s * (entry.calls + 1) for entry in entries)
        within = int(self._wish.seconds_per_row * len(entries) / max(a_round, 1e-6))
        return max(MIN_ROUNDS, min(MAX_ROUNDS, within))

    def _finish(self, entry: _Entry) -> None:
        seen = entry.client.ask("finish")
        compilation = replace(
            entry.row.compilation,
            **{key: seen[key] for key in ("graphs", "breaks", "fallbacks") if key in seen},
        )
        entry.row = replace(
            entry.row,
            times=estimates.times(entry.samples, entry.calls),
            compilation=compilation,
            peak_memory_bytes=seen["peak_memory_bytes"],
            report=seen.get("report", ""),
        )

    def _finished_row(self, entry: _Entry, baseline: _Entry) -> Row:
        row = entry.row
        self._drop(entry)
        if row.times is None or baseline.row.times is None:
            return row
        return replace(row, speedup=estimates.speedup(baseline.samples, entry.samples))

    def _drop(self, entry: _Entry) -> None:
        """Make room for the next workload; a process that cannot is replaced."""
        key = (entry.row.contender, entry.row.device)
        for client in (self._clients.get((*key, second)) for second in (False, True)):
            if client is None or not client.running:
                continue
            try:
                client.ask("drop")
            except Refusal:
                client.stop()

    def _with_roofline(self, row: Row, found: dict[str, Any]) -> Row:
        if row.times is None:
            return row
        limits = self._limits[found["limits"]]
        return replace(row, roofline=roofline.against(found["flops"], found["bytes"], limits))

    def _say(self, text: str) -> None:
        wish = self._wish
        per_workload = (2 + wish.second_process) * len(wish.contenders)
        total = per_workload * len(wish.targets) * len(wish.devices)
        self._progress(text, min(1.0, self._stages_done / total))
        self._stages_done += len(wish.contenders) if text.endswith(": timing") else 1


def _demand_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    if one["fingerprint"] != other["fingerprint"]:
        raise Refusal(
            "different",
            "weights or inputs differ from the baseline's: the builder must draw them from "
            "torch's generator only (torch.manual_seed is called before it)",
        )


def _measured_limits(client: Client, dtype: str) -> Limits:
    try:
        return Limits(**client.ask("limits", dtype=dtype))
    except Refusal:
        return Limits()  # an integer dtype, say: the roofline is left out


def _better(one: Limits | None, other: Limits) -> Limits:
    if one is None:
        return other
    fastest = max(one, other, key=lambda limits: limits.gemm_flops)
    return replace(fastest, read_bytes=max(one.read_bytes, other.read_bytes))


def _stop_all(entries: Sequence[_Entry], baseline: Row) -> None:
    for entry in entries[1:]:
        reason = f"the baseline did not run, so nothing can be verified: {baseline.reason}"
        entry.row = replace(entry.row, status=baseline.status, reason=reason)
