"""Facts x capability rows x probed devices x wish -> a Plan: one target, its providers, every no.

Deterministic: the same graph, settings and kind of machine give the same plan on every rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kernel_dispatch.facts import GraphFacts
from kernel_dispatch.registry import availability, policy, table
from kernel_dispatch.settings import Settings
from lowering import providers
from lowering.capability import GRAPH, CapabilityRow, Situation, Work, check
from lowering.contract import Probe, Target
from lowering.errors import BackendNotAvailableError
from lowering.reasons import CODES, Reason


@dataclass(frozen=True)
class Rejection:
    """A target or provider that was not chosen, with every reason."""

    target: str
    provider: str  # empty: the whole target was rejected
    region: str
    reasons: tuple[Reason, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "provider": self.provider,
            "region": self.region,
            "reasons": [reason.as_dict() for reason in self.reasons],
        }


@dataclass(frozen=True)
class Plan:
    """Where a graph runs and who may compute it, in order of preference; eager comes last."""

    target: str
    providers: tuple[str, ...]
    region_rows: tuple[CapabilityRow, ...]
    rejected: tuple[Rejection, ...]
    move_to: str | None = None  # the device to move tensors to, when a forced device differs
    refused_wish: tuple[Reason, ...] = ()  # a forced device that does not take this graph
    missing: tuple[Reason, ...] = ()  # providers of the level that this machine lacks

    @property
    def provider(self) -> str:
        return self.providers[0]

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "providers": list(self.providers),
            "regions": sorted({f"{row.region}:{row.provider}" for row in self.region_rows}),
            "rejected": [rejection.as_dict() for rejection in self.rejected],
            "move_to": self.move_to,
        }

    def fingerprint(self) -> str:
        """Equal on all ranks when the plans are equal."""
        text = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Machine:
    """What selection may ask of the machine; tests hand in any machine they like."""

    targets: Sequence[Target]
    probe: Callable[[Target], Probe]
    absent: Callable[[str], str]  # provider -> why it does not work here; empty if it does


@dataclass(frozen=True)
class _Assessment:
    """One target's answer to one graph."""

    target: Target
    providers: tuple[str, ...] = ()
    region_rows: tuple[CapabilityRow, ...] = ()
    missing: tuple[Reason, ...] = ()
    refusals: tuple[Rejection, ...] = ()


def plan(facts: GraphFacts, settings: Settings, machine: Machine) -> Plan:
    """Ask every target, take the first that has a provider, keep every other answer."""
    if settings.device is not None:
        _demand(settings, machine)
    if settings.provider is not None and not settings.provider_by_default:
        _demand_provider(settings.provider, settings, machine)
    answers = [_assess(target, facts, settings, machine) for target in machine.targets]
    chosen = next((answer for answer in answers if answer.providers), None)
    refusals = [rejection for answer in answers for rejection in answer.refusals]
    if chosen is None:
        return _without_target(facts, settings, machine, refusals)
    refusals += [
        Rejection(answer.target.name, "", GRAPH, (_came_later(answer.target, chosen.target),))
        for answer in answers
        if answer.providers and answer is not chosen
    ]
    return Plan(
        target=chosen.target.name,
        providers=chosen.providers,
        region_rows=chosen.region_rows,
        rejected=tuple(refusals),
        move_to=_move(chosen.target, machine.probe(chosen.target), facts, settings),
        missing=chosen.missing,
    )


def _came_later(target: Target, chosen: Target) -> Reason:
    return Reason("lower-priority", f"{target.name} takes it too, and {chosen.name} comes first")


def _assess(target: Target, facts: GraphFacts, settings: Settings, machine: Machine) -> _Assessment:
    found = machine.probe(target)
    no = _target_reasons(target, found, facts, settings)
    moved = not no and _move(target, found, facts, settings) is not None
    if moved:
        no = _cannot_move(facts)
    if no:
        return _Assessment(target, refusals=(Rejection(target.name, "", GRAPH, no),))
    rows = [policy.as_chosen(row, settings.provider) for row in target.rows]
    rows.sort(key=lambda row: -row.priority)
    # A probe may cost a second (Inductor's imports its compiler), so only what the level may use.
    within = [row for row in rows if row.level <= settings.level]
    wanted = {name for row in within for name in (row.provider, *row.needs)}
    situation = Situation(
        level=settings.level,
        features=frozenset(found.details.get("features", ())),
        disabled=_switched_off(target, settings),
        tolerance=settings.tolerance,
        absent={name: why for name in wanted if (why := machine.absent(name))},
    )
    answers = [
        (row, check(row, facts.work(), situation) + _stays_home(row, facts, moved))
        for row in rows
        if row.region == GRAPH
    ]
    regions = [
        (row, check(row, _smallest(row, facts), situation)) for row in rows if row.region != GRAPH
    ]
    return _Assessment(
        target,
        providers=tuple(dict.fromkeys(row.provider for row, no in answers if not no)),
        region_rows=tuple(row for row, no in regions if not no),
        # What this machine lacks, where the lack is all that stands in the provider's way.
        missing=tuple(
            no[0] for _, no in answers if [reason.code for reason in no] == ["provider-absent"]
        ),
        refusals=tuple(
            Rejection(target.name, row.provider, row.region, no)
            for row, no in [*answers, *regions]
            if no
        ),
    )


def _switched_off(target: Target, settings: Settings) -> dict[str, str]:
    """Providers that must not compute here -> who said so."""
    off = dict.fromkeys(settings.disable, "disabled by the user")
    sources = dict(settings.sources)
    if settings.provider is not None:
        because = f"off while {settings.provider} is chosen (from {sources.get('provider')})"
        off |= dict.fromkeys(policy.effect(settings.provider, target.name), because)
    return off | (settings.config.providers_off() if settings.config else {})


def _smallest(row: CapabilityRow, facts: GraphFacts) -> Work:
    """A question about machine, level and kind of graph only: sizes are asked per region."""
    return Work(
        region=row.region,
        op_count=row.min_ops,
        bytes_moved=row.min_bytes,
        flops=row.min_flops,
        training=facts.training,
        dynamic=facts.dynamic,
        subclasses=frozenset(facts.subclasses),
        shape_class=min(row.shape_classes or [""]),
    )


def _demand(settings: Settings, machine: Machine) -> None:
    """A forced device that is absent is an error, never a fallback."""
    wish = settings.device
    assert wish is not None
    source = dict(settings.sources).get("device", "")
    here = [target.name for target in machine.targets if machine.probe(target).available]
    found = next(machine.probe(t) for t in machine.targets if t.name == wish.target)
    if settings.config is not None and (why := settings.config.target_off(wish.target)):
        text = f"device {str(wish)!r} was forced (from {source}), and {why}."
        raise BackendNotAvailableError(f"{text} Available: {', '.join(here)}.")
    if not found.available:
        fix = f" To get it: {found.fix}" if found.fix else ""
        raise BackendNotAvailableError(
            f"device {str(wish)!r} was forced (from {source}) and is not here: {found.reason}. "
            f"Available: {', '.join(here)}.{fix}"
        )
    count = int(found.details.get("device_count", 1))
    if wish.index is not None and wish.index >= count:
        raise BackendNotAvailableError(
            f"device {str(wish)!r} was forced (from {source}), and {wish.target} has {count} "
            f"device(s), numbered from 0. Available: {', '.join(here)}."
        )


def _demand_provider(name: str, settings: Settings, machine: Machine) -> None:
    """So is a provider that was chosen by name."""
    why = availability.reason(table.demand(name), machine, settings.config)
    if why:
        source = dict(settings.sources).get("provider", "")
        whys = availability.reasons(machine, settings.config)
        raise BackendNotAvailableError(
            f"provider {name!r} was chosen (from {source}) and cannot be used here: {why}. "
            f"Available: {', '.join(one for one, no in whys.items() if not no)}."
        )


def _target_reasons(
    target: Target, found: Probe, facts: GraphFacts, settings: Settings
) -> tuple[Reason, ...]:
    """Why a target is out before any of its rows is asked."""
    reasons = []
    if not found.available:
        reasons.append(Reason("target-absent", found.reason))
    if settings.config is not None and (why := settings.config.target_off(target.name)):
        reasons.append(Reason("provider-disabled", why))
    if settings.device is not None:
        if settings.device.target != target.name:
            reasons.append(Reason("not-requested", f"{settings.device} was forced"))
    elif not _holds(target, facts):
        reasons.append(Reason("tensors-elsewhere", f"the tensors are on {_on(facts)}"))
    if not reasons and not any(row.region == GRAPH for row in target.rows):
        reasons.append(Reason("no-lowering", f"{target.name} has no lowering in this version"))
    return tuple(reasons)


def _on(facts: GraphFacts) -> str:
    return ", ".join(facts.devices) or "no device"


def _holds(target: Target, facts: GraphFacts) -> bool:
    """Do the tensors live on this target? CPU scalars beside them are normal in torch."""
    accelerators = {device for device in facts.devices if device != "cpu"}
    if not accelerators:
        return "cpu" in target.device_types
    return accelerators <= set(target.device_types)


def _move(target: Target, found: Probe, facts: GraphFacts, settings: Settings) -> str | None:
    """Does a forced device mean that tensors have to travel?"""
    if settings.device is None:
        return None
    index = settings.device.index
    if target.to_target is not None:
        return target.name
    elsewhere = not set(facts.devices) <= set(target.device_types)
    other_card = index is not None and target.device_types != ("cpu",)
    if not elsewhere and not other_card:
        return None
    device = found.details.get("device", target.device_types[0])
    return device if index is None else f"{device}:{index}"


_MOVES_BY_NAME = frozenset({"cpu", "cuda", "xpu", "pin_memory", "share_memory_"})


def _cannot_move(facts: GraphFacts) -> tuple[Reason, ...]:
    """Every reason why a graph must stay where its tensors are, whoever would compute it."""
    texts = []
    if facts.subclasses:
        texts.append(f"tensor subclasses are not moved: {', '.join(facts.subclasses)}")
    if moving := sorted(_MOVES_BY_NAME & {name for name, _ in facts.ops}):
        texts.append(f"the graph moves tensors itself: {', '.join(moving)}")
    return _refused(facts, texts)


def _stays_home(row: CapabilityRow, facts: GraphFacts, moved: bool) -> tuple[Reason, ...]:
    """What only a provider can move that does it behind autograd."""
    if not moved or providers.get(row.provider).moves:
        return ()
    texts = []
    if facts.training:
        texts.append("a graph that needs gradients is not moved")
    if facts.written_inputs:
        texts.append("a graph that writes into its inputs is not moved")
    return _refused(facts, texts)


def _refused(facts: GraphFacts, texts: Sequence[str]) -> tuple[Reason, ...]:
    return tuple(Reason("placement-refused", text, facts.place) for text in texts)


def _without_target(
    facts: GraphFacts, settings: Settings, machine: Machine, refusals: list[Rejection]
) -> Plan:
    """Nobody takes it. A refused wish falls back to where the tensors live; else plain eager."""
    if settings.device is None:
        home = next((device for device in facts.devices if device != "cpu"), "cpu")
        why = f"no target takes a graph on {_on(facts)}; torch runs it op by op"
        nobody = Rejection(home, "", GRAPH, (Reason("no-target", why),))
        return Plan(home, ("eager",), (), (*refusals, nobody))
    wished = settings.device.target
    at_home = plan(facts, replace(settings, device=None), machine)
    # What the wished target said of the wish, and what everybody says of the graph at home.
    told = [no for no in refusals if no.target == wished]
    told += [no for no in at_home.rejected if no.target != wished]
    refused = _refused_wish(wished, refusals)
    return replace(at_home, rejected=tuple(told), refused_wish=refused)


def _refused_wish(wished: str, refusals: list[Rejection]) -> tuple[Reason, ...]:
    """Why nobody on the forced target takes the graph; first what all of them said, then what the
    user did."""
    answers = [no.reasons for no in refusals if no.target == wished and no.region == GRAPH]
    shared = [code for code in CODES if all(code in {r.code for r in one} for one in answers)]
    reasons = (reason for one in answers for reason in one)
    order = lambda reason: (reason.code not in shared, reason.code != "provider-disabled")  # noqa: E731
    return tuple(sorted(reasons, key=order))
