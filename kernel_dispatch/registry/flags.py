"""What a compilation by a provider is really told: its options, Inductor's config, C++ flags."""

from __future__ import annotations

from kernel_dispatch.registry import policy
from kernel_dispatch.registry.table import BackendInfo
from kernel_dispatch.settings import resolve
from lowering import toolchain
from lowering.contract import Target
from lowering.levels import Level
from lowering.native import library


def of(info: BackendInfo, target: Target) -> str:
    """`name=value`, as the settings in force give them, then the C++ compiler's flags."""
    settings = resolve(None, {"provider": info.name, "device": target.name})
    off = policy.switched_off(info, target.name) | settings.disable
    words = [f"provider={info.name}", f"device={target.name}", f"level={settings.level}"]
    words += [f"disable={','.join(sorted(off))}"] if off else []
    words += [f"threads={settings.threads}"] if settings.threads else []
    config = dict(target.inductor_config(settings.level) if target.inductor_config else {})
    config |= policy.inductor_config(info.name, target.name, settings.level)
    config |= dict(settings.inductor)
    words += [f"inductor.{key}={value}" for key, value in sorted(config.items())]
    if target.name == "cpu" and settings.level >= Level.O2 and toolchain.probe().available:
        words += library.compile_flags()
    return " ".join(words)
