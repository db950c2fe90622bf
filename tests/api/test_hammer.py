"""A hundred threads at once: nobody waits for ever, and nobody gets another's default or settings.

A hammer returns what went wrong, one sentence each. Each is tried twice: on the code as it is, and
on code with the lock or the context variable taken out, which it has to notice.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kernel_dispatch
from kernel_dispatch import default_backend, settings
from kernel_dispatch.backends import (
    BackendFactory,
    BackendType,
    get_backend,
    list_available_backends,
)
from kernel_dispatch.registry import BackendInterface, BackendRegistry, ProviderId

THREADS = 100
LEVELS = ("O0", "O1")

Work = Callable[[int, Callable[[], None]], Iterator[str]]


@pytest.fixture(autouse=True)
def nobody_chose() -> Iterator[None]:
    kernel_dispatch.set_default_backend(None)
    yield
    kernel_dispatch.set_default_backend(None)


@pytest.fixture
def turns_often() -> Iterator[None]:
    """Threads are interrupted at almost any line."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def hammer(work: Work, timeout: float = 60) -> list[str]:
    """What `work(number, together)` says in a hundred threads, and who never came back.

    `together` returns once every thread has called it: what one did before, all others have done.
    """
    barrier = threading.Barrier(THREADS)
    said: list[str] = []

    def together() -> None:
        barrier.wait(timeout)

    def run(number: int) -> None:
        try:
            said.extend(work(number, together))
        except threading.BrokenBarrierError:
            said.append(f"thread {number} waited in vain for the others")
        except Exception as error:  # noqa: BLE001  (whatever it is belongs into the list)
            said.append(f"thread {number}: {type(error).__name__}: {error}")
            barrier.abort()

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    stuck = sum(thread.is_alive() for thread in threads)
    return [*said, f"{stuck} threads never came back"] if stuck else said


# --- what is removed, to see that a hammer notices ------------------------------------------------


class Global:
    """A context variable as it must not be: one value for all threads."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value

    def set(self, value: Any) -> Any:
        before, self.value = self.value, value
        return before

    def reset(self, before: Any) -> None:
        self.value = before


class NoLock(contextlib.nullcontext[None]):
    """A lock as it must not be."""


class SlowDict(dict[Any, Any]):
    """Whoever asks for a key that is missing gets the answer once a second one has asked as well.

    Under a lock no second one can come, and the first goes on after a moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pair = threading.Barrier(2)

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        with contextlib.suppress(threading.BrokenBarrierError):
            self._pair.wait(1)
        return False


# --- defaults and settings ------------------------------------------------------------------------


def own_default(number: int, together: Callable[[], None]) -> Iterator[str]:
    """Each thread chooses, all look: by every function that knows of the choice."""
    available = kernel_dispatch.get_available_backends()
    mine = available[number % len(available)]
    registry = BackendRegistry.instance()
    for _ in range(3):
        kernel_dispatch.set_default_backend(mine)
        together()
        seen = {
            "get_default_backend": kernel_dispatch.get_default_backend(),
            "the registry": registry.get_default_backend().get_name(),
            "settings": settings.resolve().provider,
        }
        together()
        yield from (
            f"thread {number} chose {mine}, and {where} says {other}"
            for where, other in seen.items()
            if other != mine
        )


def own_level(number: int, together: Callable[[], None]) -> Iterator[str]:
    mine = f"O{number % 4}"
    with kernel_dispatch.configure(level=mine):
        together()
        seen = settings.resolve()
        together()
    if str(seen.level) != mine:
        yield f"thread {number} configured {mine} and got {seen.level}"
    if settings.in_context():
        yield f"thread {number} left configure() and is still in it"


def own_graph(number: int, together: Callable[[], None]) -> Iterator[str]:
    """Each thread compiles a function of its own under a level and a default of its own."""
    available = kernel_dispatch.get_available_backends()
    mine, level = available[number % len(available)], LEVELS[number % 2]
    function = a_function(number)
    kernel_dispatch.set_default_backend(mine)
    together()
    with kernel_dispatch.configure(level=level):
        backend = kernel_dispatch.unified if number % 3 else "unified"  # the same to torch
        compiled = torch.compile(function, backend=backend)
        x = torch.ones(3)
        answers = [compiled(x) for _ in range(3)]
    if any(not torch.equal(answer, function(x)) for answer in answers):
        yield f"thread {number} got another's answer: {answers}"
    graphs = kernel_dispatch.report(compiled)
    found = [
        (g.level, g.settings.provider, g.runs, dict(g.settings.sources)["level"]) for g in graphs
    ]
    if found != [(level, mine, 3, "configure()")]:
        yield f"thread {number} compiled at {level} for {mine}: {found}"


def a_function(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """With code of its own: equal compilations of one piece of code share graphs."""
    scope: dict[str, Any] = {}
    exec(f"def function_{number}(x):\n    return x * {number} + 1", scope)
    return scope[f"function_{number}"]


def test_no_thread_sees_the_default_of_another() -> None:
    assert hammer(own_default) == []
    assert default_backend.chosen() in kernel_dispatch.get_available_backends()  # the last one


def test_a_shared_default_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_backend, "_here", Global(""))
    assert "chose" in " ".join(hammer(own_default))


@pytest.mark.quick
@pytest.mark.usefixtures("turns_often")
def test_no_thread_sees_the_settings_of_another() -> None:
    assert hammer(own_level) == []


@pytest.mark.quick
def test_shared_settings_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_context", Global({}))
    assert "configured" in " ".join(hammer(own_level))


def test_every_graph_has_its_own_threads_settings() -> None:
    kernel_dispatch.register()  # torch looks a name up without a lock of its own
    assert hammer(own_graph, timeout=300) == []
    graphs = kernel_dispatch.report()
    assert len(graphs) == THREADS
    assert sum(graph.runs for graph in graphs) == 3 * THREADS
    assert not graphs.fallbacks


@pytest.mark.usefixtures("turns_often")
def test_calls_from_many_threads_are_all_counted() -> None:
    """One compiled function, called by all of them."""
    compiled = torch.compile(a_function(7), backend="unified", options={"level": "O1"})
    x = torch.ones(3)
    expected = compiled(x)

    def call(number: int, together: Callable[[], None]) -> Iterator[str]:
        together()
        for _ in range(20):
            if not torch.equal(compiled(x), expected):
                yield f"thread {number} got another answer"

    assert hammer(call) == []
    (graph,) = kernel_dispatch.report(compiled)
    assert graph.runs == 1 + 20 * THREADS


# --- the registry and the factory -----------------------------------------------------------------


class Toy(BackendInterface):
    """A provider that computes nothing, under a number of the fourteen."""

    def __init__(self, kind: ProviderId) -> None:
        self.kind = kind

    def get_type(self) -> ProviderId:
        return self.kind

    def get_name(self) -> str:
        return self.kind.name.lower()

    def is_available(self) -> bool:
        return True

    def compile(self, ctx: Any) -> bool:
        return False

    def get_compile_flags(self) -> str:
        return ""

    def allocate_memory(self, size: int) -> int:
        return 0

    def free_memory(self, ptr: int) -> None: ...

    def synchronize(self) -> None: ...

    def get_max_memory(self) -> int:
        return 0

    def get_max_shared_memory(self) -> int:
        return 0

    def supports_data_type(self, dt: Any) -> bool:
        return False


def register_and_ask(registry: BackendRegistry, taken: list[bool], gone: list[bool]) -> Work:
    """All want the same number; one gets it. All take it back; one does."""

    def work(number: int, together: Callable[[], None]) -> Iterator[str]:
        toy = Toy(ProviderId.NKI)
        together()
        taken.append(registry.register_backend(toy))
        together()
        for key in (ProviderId.NKI, "nki", "NKI"):
            if not isinstance(registry.get_backend(key), Toy):
                yield f"thread {number} found {registry.get_backend(key)} under {key!r}"
        if registry.get_available_backends() != [ProviderId.NKI]:
            yield f"thread {number} sees {registry.get_available_backends()}"
        if not registry.is_backend_available("nki"):
            yield f"thread {number} cannot use what is registered"
        together()
        gone.append(registry.unregister_backend("nki"))
        together()
        if registry.get_backend("nki") is not None:
            yield f"thread {number} found what all had taken back"
        together()
        registry.register_backend(toy, override=True)
        together()
        if not isinstance(registry.get_backend("nki"), Toy):
            yield f"thread {number} lost what all had registered"

    return work


def raced(registry: BackendRegistry, timeout: float = 60) -> list[str]:
    taken: list[bool] = []
    gone: list[bool] = []
    said = hammer(register_and_ask(registry, taken, gone), timeout)
    for what, answers in (("registered", taken), ("taken back", gone)):
        if said == [] and (len(answers), sum(answers)) != (THREADS, 1):
            said = [f"{what} {sum(answers)} times, by {len(answers)} threads"]
    return said


@pytest.mark.quick
@pytest.mark.usefixtures("turns_often")
def test_one_of_a_hundred_registers() -> None:
    registry = BackendRegistry([])
    registry._backends = SlowDict()
    assert raced(registry) == []


@pytest.mark.quick
def test_a_registry_without_its_lock_would_be_noticed() -> None:
    registry = BackendRegistry([])
    registry._backends = SlowDict()
    registry._lock = NoLock()  # type: ignore[assignment]
    (said,) = raced(registry)  # how many of them depends on the machine, but never one alone
    assert said.startswith("registered")


@pytest.mark.quick
def test_a_deadlock_would_be_noticed() -> None:
    registry = BackendRegistry([])
    lock = threading.Lock()
    lock.acquire()
    registry._lock = lock  # type: ignore[assignment]
    try:
        assert raced(registry, timeout=0.5)[-1] == "100 threads never came back"
    finally:
        lock.release()  # so that they can leave


@pytest.mark.quick
def test_the_process_has_one_registry() -> None:
    """However many ask first, and however long building it takes."""
    built = []

    class Slow(BackendRegistry):
        _instance = None

        def __init__(self) -> None:
            built.append(self)
            time.sleep(0.01)
            super().__init__([])

    found = []

    def ask(number: int, together: Callable[[], None]) -> Iterator[str]:
        together()
        found.append(Slow.get_instance())
        yield from ()

    assert hammer(ask) == []
    assert len(built) == 1 and {id(one) for one in found} == {id(built[0])}


def ask_everything(number: int, together: Callable[[], None]) -> Iterator[str]:
    """What the functions answer does not depend on who else asks."""
    together()
    available = kernel_dispatch.get_available_backends()
    answers = {
        "providers": available,
        "vendors": list_available_backends(),
        "each is available": all(map(kernel_dispatch.is_backend_available, available)),
        "best": BackendFactory.is_available(BackendType.AUTO),
        "a backend": get_backend(list_available_backends()[0]).BACKEND_NAME,
        "info": kernel_dispatch.get_backend_info("cpu")["compute_units"],
        "absent": kernel_dispatch.is_backend_available("nki"),
    }
    if number % 25 == 0:
        kernel_dispatch.list_backends(verbose=True)
    yield repr(answers)


def test_a_hundred_threads_get_the_same_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Also when none of them finds a probe answered yet."""
    from kernel_dispatch import devices

    devices.forget()
    answers = hammer(ask_everything)
    assert len(answers) == THREADS
    assert len(set(answers)) == 1, set(answers)
    assert "'cpu'" in answers[0]
    assert capsys.readouterr().out.count("Intel Xeon") >= THREADS // 25
