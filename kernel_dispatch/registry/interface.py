"""What every provider can be asked for, and what a compilation is told and tells."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kernel_dispatch.registry.provider_id import ProviderId
from lowering.levels import Level

if TYPE_CHECKING:
    import torch

    from kernel_dispatch.reporting import Report


@dataclass
class CompileContext:
    """One compilation: the upper half is asked, `compile()` fills in the lower half."""

    model: Callable[..., Any]
    example_inputs: Sequence[Any] | Mapping[str, Any] = ()  # by position, or by name
    level: Level | str = Level.O2
    num_workers: int | None = None  # CPU threads while it compiles and runs
    training: bool = False  # with gradients; most providers compute inference only
    options: Mapping[str, Any] = field(default_factory=dict)  # more options of torch.compile

    compiled: Callable[..., Any] | None = None
    report: Report | None = None
    taken: tuple[str, ...] = ()  # "linear:mkl": what this provider computed
    notes: tuple[str, ...] = ()  # what fell short, and why nothing was taken
    error: Exception | None = None


class BackendInterface(ABC):
    """A provider: information, compilation, memory, and what it is capable of."""

    @abstractmethod
    def get_type(self) -> ProviderId:
        """Which of the fourteen it is."""

    @abstractmethod
    def get_name(self) -> str:
        """Its name, as functions and the configuration file know it."""

    @abstractmethod
    def is_available(self) -> bool:
        """Does it work here? Looks at the machine."""

    @abstractmethod
    def compile(self, ctx: CompileContext) -> bool:
        """True if `ctx.compiled` can be called; else `ctx.error` has what stood in the way."""

    @abstractmethod
    def get_compile_flags(self) -> str:
        """What a compilation by it would really be told."""

    @abstractmethod
    def allocate_memory(self, size: int) -> int:
        """The address of so many bytes on its device; they live until `free_memory`."""

    @abstractmethod
    def free_memory(self, ptr: int) -> None:
        """Give such memory back; an address that is not allocated is an error."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until its device has done everything that it was given."""

    @abstractmethod
    def get_max_memory(self) -> int:
        """Bytes of memory on its device."""

    @abstractmethod
    def get_max_shared_memory(self) -> int:
        """Bytes that the threads of one group share; of a CPU, its largest cache."""

    @abstractmethod
    def supports_data_type(self, dt: torch.dtype | str) -> bool:
        """Does it compute in this dtype?"""
