"""The pool: phases, addresses, and what it does when a step isn't the one it traced."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_v2 import TracePoolAllocator
from megatron_fsdp_v2.memory import device as device_module
from megatron_fsdp_v2.memory.allocator import ALL_GATHER, REDUCE_SCATTER, BufferSpec, DynamicAllocator

CPU = torch.device("cpu")
SIZES = {"A": 6, "B": 6, "C": 6, "D": 3}


def spec(numel: int, dtype: torch.dtype = torch.float32, arena: str | None = ALL_GATHER) -> BufferSpec:
    return BufferSpec(numel, dtype, CPU, arena)


def play(pool: Any, events: str, sizes: dict[str, int] = SIZES) -> None:
    """Letters: upper case is allocated, lower case (``a`` for ``A``) freed."""
    for event in events:
        if event.isupper():
            pool.allocate(event, spec(sizes[event]))
        else:
            pool.free(event.upper())


def planned(events: str, sizes: dict[str, int] = SIZES, **options: Any) -> TracePoolAllocator:
    pool = TracePoolAllocator(**options)
    play(pool, events, sizes)
    pool.plan()
    return pool


def address(pool: Any, key: str, numel: int) -> int:
    """Where the key lies; it's left free."""
    tensor = pool.allocate(key, spec(numel))
    pool.free(key)
    return int(tensor.data_ptr())


# Tracing


def test_while_tracing_a_buffer_has_memory_of_its_own() -> None:
    pool = TracePoolAllocator()
    assert pool.is_tracing
    tensor = pool.allocate("A", spec(6))
    saved = tensor[2:5].view(1, 3)
    assert pool.is_live("A")
    pool.free("A")
    assert (pool.is_live("A"), tensor.untyped_storage().nbytes()) == (False, 0)
    assert pool.allocate("A", spec(6)) is tensor
    tensor.copy_(torch.arange(6.0))
    assert saved.tolist() == [[2.0, 3.0, 4.0]]


def test_a_size_grows_while_tracing_on_the_same_storage() -> None:
    pool = TracePoolAllocator()
    first = pool.allocate("A", spec(4))
    pool.free("A")
    larger = pool.allocate("A", spec(9))
    assert larger.untyped_storage()._cdata == first.untyped_storage()._cdata
    assert larger.fill_(2.0).numel() == 9
    assert first.tolist() == [2.0] * 4
    assert pool.allocate("A", spec(5)).tolist() == [2.0] * 5
    pool.free("A")
    pool.plan()
    assert pool.stats().pool_bytes == 36


def test_a_live_buffer_does_not_grow() -> None:
    pool = TracePoolAllocator()
    pool.allocate("A", spec(4))
    with pytest.raises(ValueError, match="buffer A has memory for 4 elements and can't hold 9"):
        pool.allocate("A", spec(9))


@pytest.mark.parametrize("make", [TracePoolAllocator, DynamicAllocator])
@pytest.mark.parametrize("other", [spec(4, torch.bfloat16), spec(4, arena=REDUCE_SCATTER)])
def test_a_buffer_stays_what_it_is(make: Callable[[], Any], other: BufferSpec) -> None:
    allocator = make()
    allocator.allocate("A", spec(4))
    allocator.free("A")
    with pytest.raises(ValueError, match=r"buffer A was 4 x torch.float32 on cpu .* and can't become"):
        allocator.allocate("A", other)


def test_a_trace_begun_anew_forgets_what_was_not_seen_since() -> None:
    pool = TracePoolAllocator()
    play(pool, "ABCcba")
    pool.begin_trace()
    play(pool, "AaBb")
    pool.plan()
    assert [slot.buffers for slot in pool.slots()] == [("A", "B")]


# Planning


def test_buffers_never_in_use_together_share_a_slot() -> None:
    pool = planned("ABaCbcDd")
    shown = [(slot.index, slot.nbytes, slot.buffers) for slot in pool.slots()]
    assert shown == [(0, 24, ("A", "C", "D")), (1, 24, ("B",))]
    stats = pool.stats()
    assert (stats.phase, stats.pool_bytes, stats.live_bytes, stats.peak_live_bytes) == ("ready", 48, 0, 48)


def test_arenas_and_dtypes() -> None:
    pool = TracePoolAllocator()
    for key, what in [("a", spec(8, torch.bfloat16)), ("b", spec(4)), ("c", spec(4, arena=REDUCE_SCATTER))]:
        pool.allocate(key, what)
        pool.free(key)
    pool.plan()
    assert [(slot.arena, slot.nbytes, slot.buffers) for slot in pool.slots()] == [
        (ALL_GATHER, 16, ("a", "b")),
        (REDUCE_SCATTER, 16, ("c",)),
    ]
    assert pool.allocate("a", spec(8, torch.bfloat16)).dtype is torch.bfloat16


def test_long_lived_buffers_stay_out_of_the_pool() -> None:
    pool = TracePoolAllocator()
    kept = pool.allocate("main", spec(5, arena=None)).fill_(3.0)
    play(pool, "Aa")
    pool.plan()
    assert pool.allocate("main", spec(5, arena=None)) is kept
    assert (kept.tolist(), pool.is_live("main")) == ([3.0] * 5, True)
    stats = pool.stats()
    assert stats.pool_bytes == 24
    assert [(arena.arena, arena.pool_bytes) for arena in stats.arenas] == [(None, 20), (ALL_GATHER, 24)]
    pool.free("main")
    assert kept.untyped_storage().nbytes() == 0


def test_planning_refuses_live_buffers_by_name() -> None:
    pool = TracePoolAllocator()
    play(pool, "AB")
    with pytest.raises(RuntimeError, match="can't plan the memory pool while buffers are in use: A, B"):
        pool.plan()
    play(pool, "ab")
    pool.plan()


def test_planning_twice_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"planned already \(phase ready\); reset"):
        planned("Aa").plan()


def test_an_empty_trace_gives_a_plan_without_slots() -> None:
    pool = planned("")
    assert (pool.slots(), pool.stats().phase, pool.stats().pool_bytes) == ((), "ready", 0)
    with pytest.warns(UserWarning, match=r"buffer A was not in use"):
        pool.allocate("A", spec(6))


def test_an_empty_buffer() -> None:
    pool = planned("AaAa", {"A": 0})
    assert pool.allocate("A", spec(0)).numel() == 0


def test_the_trace_takes_no_more_memory_once_planned() -> None:
    pool = TracePoolAllocator()
    tensor = pool.allocate("A", spec(6))
    pool.free("A")
    pool.plan()
    assert pool.allocate("A", spec(6)) is not tensor
    assert tensor.untyped_storage().nbytes() == 0


def test_a_plan_that_finds_no_memory_leaves_a_pool_that_traces() -> None:
    @contextmanager
    def full() -> Iterator[None]:
        raise MemoryError("full")
        yield

    pool = TracePoolAllocator(memory_context=full)
    play(pool, "ABab")
    before = pool.generation
    with pytest.raises(MemoryError):
        pool.plan()
    assert (pool.is_tracing, pool.slots()) == (True, ())
    assert pool.generation > before
    play(pool, "ABab")


def test_slots_get_their_memory_inside_the_context() -> None:
    inside: list[str] = []

    @contextmanager
    def context() -> Iterator[None]:
        inside.append("in")
        yield

    pool = planned("Aa", memory_context=context)
    pool.release()
    pool.resume()
    with pytest.warns(UserWarning, match="buffer B"):
        pool.allocate("B", spec(1))
    assert inside == ["in"] * 3


# Ready


def test_an_address_does_not_change_over_50_steps() -> None:
    pool = planned("ABaCbcDd")
    tensors = {key: pool.allocate(key, spec(SIZES[key])) for key in "AB"}
    addresses = {key: tensor.data_ptr() for key, tensor in tensors.items()}
    play(pool, "ab")
    for _ in range(50):
        for key in "AB":
            assert pool.allocate(key, spec(SIZES[key])) is tensors[key]
            assert tensors[key].data_ptr() == addresses[key]
        play(pool, "aCbcDd")
    assert pool.generation == 1


def test_a_buffer_in_use_is_the_same_and_keeps_its_contents() -> None:
    pool = planned("Aa")
    pool.allocate("A", spec(6)).fill_(3.0)
    assert pool.allocate("A", spec(6)).tolist() == [3.0] * 6
    pool.free("A")
    assert not pool.is_live("A")


def test_another_order_works_where_no_slot_is_shared_at_once() -> None:
    pool = planned("ABaCbc")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        play(pool, "CBcAba")
    assert pool.stats().collisions == 0


def test_a_slot_in_use_by_another_buffer_raises() -> None:
    pool = planned("ABaCbc")
    pool.allocate("A", spec(6)).fill_(1.0)
    with pytest.raises(RuntimeError, match=r"buffer C needs slot 0 .* which A is using \(phase ready\).*reset"):
        pool.allocate("C", spec(6))
    assert pool.stats().collisions == 1
    assert (pool.is_live("C"), pool.is_live("A")) == (False, True)
    play(pool, "aC")


def test_a_larger_buffer_raises() -> None:
    with pytest.raises(ValueError, match=r"buffer D has memory for 3 elements and can't hold 4; .*reset"):
        planned("DdAa").allocate("D", spec(4))


def test_a_smaller_buffer_lies_at_the_same_address() -> None:
    pool = planned("Aa")
    whole = address(pool, "A", 6)
    narrow = pool.allocate("A", spec(2))
    assert (narrow.numel(), narrow.data_ptr()) == (2, whole)
    assert pool.allocate("A", spec(2)) is narrow
    pool.free("A")
    assert pool.allocate("A", BufferSpec(6, torch.float32, CPU, ALL_GATHER)).numel() == 6


@pytest.mark.parametrize("other", [spec(6, torch.int32), spec(6, arena=REDUCE_SCATTER)])
def test_a_buffer_that_became_another_raises(other: BufferSpec) -> None:
    with pytest.raises(ValueError, match=r"buffer A was 6 x torch.float32 .* and can't become 6 x .*"):
        planned("Aa").allocate("A", other)


def test_a_late_buffer_gets_a_slot_of_its_own_with_one_warning() -> None:
    pool = planned("AaBb")
    with pytest.warns(UserWarning, match="buffer C was not in use in the step .* gets 24 bytes") as seen:
        play(pool, "ACca")
    assert len(seen) == 1
    where = address(pool, "C", 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            play(pool, "BC")
            assert pool.allocate("C", spec(6)).data_ptr() == where
            play(pool, "cb")
    stats = pool.stats()
    assert (stats.late_keys, stats.pool_bytes, len(pool.slots())) == (1, 48, 2)


def test_a_buffer_known_from_before_the_trace_is_late_with_its_largest_size() -> None:
    pool = TracePoolAllocator()
    play(pool, "Cc")
    pool.begin_trace()
    play(pool, "Aa")
    pool.plan()
    pool.free("C")
    with pytest.warns(UserWarning, match="buffer C"):
        assert pool.allocate("C", spec(2)).numel() == 2
    assert pool.slots()[1].nbytes == 24


def test_a_strict_pool_raises_for_a_late_buffer() -> None:
    with pytest.raises(KeyError, match="buffer C is not in the traced step"):
        planned("Aa", strict=True).allocate("C", spec(6))


def test_freeing_twice_is_counted() -> None:
    pool = planned("Aa")
    play(pool, "Aaa")
    assert pool.stats().redundant_frees == 1
    tracing = TracePoolAllocator()
    play(tracing, "Aaa")
    assert tracing.stats().redundant_frees == 1


@pytest.mark.parametrize("make", [DynamicAllocator, TracePoolAllocator, lambda: planned("Aa")])
def test_freeing_the_unknown_raises(make: Callable[[], Any]) -> None:
    with pytest.raises(KeyError, match="buffer X was never allocated"):
        make().free("X")


def test_a_reserved_buffer_has_its_place() -> None:
    pool = TracePoolAllocator()
    play(pool, "A")
    pool.reserve("B", spec(6))
    pool.reserve("main", spec(6, arena=None))
    play(pool, "a")
    pool.plan()
    assert [slot.buffers for slot in pool.slots()] == [("A",), ("B",)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        play(pool, "AB")
        pool.reserve("C", spec(6))
    assert len(pool.slots()) == 2


def test_a_plan_made_in_inference_serves_training() -> None:
    pool = TracePoolAllocator()
    play(pool, "Aa")
    with torch.inference_mode():
        pool.plan()
        half = pool.allocate("A", spec(3))
        pool.free("A")
        with pytest.warns(UserWarning, match="buffer B"):
            late = pool.allocate("B", spec(3))
    whole = pool.allocate("A", spec(6))
    assert not any(tensor.is_inference() for tensor in (half, late, whole))


# Release, resume, reset


def test_release_gives_memory_back_and_resume_takes_it_for_the_same_tensors() -> None:
    pool = planned("ABab")
    tensor = pool.allocate("A", spec(6))
    view = tensor[1:3]
    pool.free("A")
    for _ in range(2):
        pool.release()
        assert (pool.stats().phase, pool.stats().pool_bytes, tensor.untyped_storage().nbytes()) == ("released", 0, 0)
        assert len(pool.slots()) == 2
    assert pool.generation == 1
    for _ in range(2):
        pool.resume()
        assert (pool.stats().phase, pool.stats().pool_bytes, pool.generation) == ("ready", 48, 2)
    assert pool.allocate("A", spec(6)) is tensor
    tensor.copy_(torch.arange(6.0))
    assert view.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("event", ["A", "a"])
def test_the_first_use_resumes(event: str) -> None:
    pool = planned("Aa")
    pool.release()
    assert not pool.is_live("A")
    play(pool, event)
    assert (pool.stats().phase, pool.generation) == ("ready", 2)


def test_a_late_buffer_resumes_too() -> None:
    pool = planned("Aa")
    pool.release()
    with pytest.warns(UserWarning, match="buffer B"):
        play(pool, "B")
    play(pool, "A")


def test_a_long_lived_buffer_does_not_resume() -> None:
    pool = planned("Aa")
    pool.release()
    pool.allocate("main", spec(6, arena=None))
    pool.free("main")
    assert pool.stats().phase == "released"


@pytest.mark.parametrize("action", ["release", "reset"])
@pytest.mark.parametrize("make", [DynamicAllocator, TracePoolAllocator, lambda: planned("AaBb")])
def test_memory_in_use_is_not_taken(make: Callable[[], Any], action: str) -> None:
    allocator = make()
    allocator.allocate("main", spec(6, arena=None))
    allocator.allocate("B", spec(6)).fill_(4.0)
    with pytest.raises(RuntimeError, match=f"can't {action} the memory pool while buffers are in use: B;"):
        getattr(allocator, action)()
    assert allocator.allocate("B", spec(6)).tolist() == [4.0] * 6
    allocator.free("B")
    getattr(allocator, action)()
    allocator.resume()


@pytest.mark.parametrize("prepare", ["", "plan", "plan release"])
@pytest.mark.parametrize("action", ["reset", "release"])
def test_reset_traces_anew(prepare: str, action: str) -> None:
    pool = TracePoolAllocator()
    play(pool, "Aa")
    for step in prepare.split():
        getattr(pool, step)()
    if prepare and action == "release":
        return
    generation = pool.generation
    getattr(pool, action)()
    assert (pool.stats().phase, pool.generation, pool.slots()) == ("tracing", generation + 1, ())
    # Another dtype and a larger size: nothing is left of before.
    pool.allocate("A", spec(60, torch.float64))
    pool.free("A")
    pool.plan()
    assert pool.stats().pool_bytes == 480


def test_resume_while_tracing_does_nothing() -> None:
    pool = TracePoolAllocator()
    pool.resume()
    assert (pool.stats().phase, pool.generation) == ("tracing", 0)


def test_reset_frees_slots_that_views_still_show() -> None:
    pool = planned("Aa")
    tensor = pool.allocate("A", spec(6))
    pool.free("A")
    pool.reset()
    assert tensor.untyped_storage().nbytes() == 0


# Graphs


class _Capturing:
    """Stands in for the module of a device whose stream is being captured."""

    @staticmethod
    def is_current_stream_capturing() -> bool:
        return True


@pytest.mark.parametrize("action", ["plan", "resume", "late"])
def test_no_memory_is_taken_while_a_graph_is_captured(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = TracePoolAllocator()
    play(pool, "Aa")
    if action != "plan":
        pool.plan()
    if action == "resume":
        pool.release()
    monkeypatch.setattr(device_module, "_module", lambda device: _Capturing)
    with pytest.raises(RuntimeError, match="while a device graph is captured"):
        play(pool, "B") if action == "late" else getattr(pool, action)()
    monkeypatch.undo()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match=r"inside a torch.compile graph"):
        play(pool, "B") if action == "late" else getattr(pool, action)()


# Looking at it


def test_lifetimes_name_slots_and_sizes() -> None:
    pool = planned("ABaCbc")
    shown = [(item.buffer, item.nbytes, item.slot, item.start, item.end) for item in pool.lifetimes()]
    assert shown == [("A", 24, 0, 1, 3), ("B", 24, 1, 2, 5), ("C", 24, 0, 4, 6)]
    pool.release()
    assert len(pool.lifetimes()) == 3


def test_the_dump_is_a_table() -> None:
    pool = planned("ABaCbc", {"A": 2**18, "B": 2**18, "C": 2**17})
    pool.allocate("main", spec(2**18, arena=None))
    play(pool, "B", {"B": 2**18})
    assert pool.dump() == (
        "phase ready, generation 1, collisions 0, late buffers 0, redundant frees 0\n"
        "arena        device  held  in use  peak use  slots  buffers\n"
        "none         cpu     1.00    1.00      1.00      1        1\n"
        "all-gather   cpu     2.00    1.00      2.00      2        3\n"
        "named (MiB)          2.00    1.00      2.00      2        3\n"
        "\n"
        "slot  arena       size  buffers  in use\n"
        "0     all-gather  1.00        2       -  A, C\n"
        "1     all-gather  1.00        1       B  B"
    )


def test_the_dump_of_the_dynamic_allocator() -> None:
    allocator = DynamicAllocator()
    play(allocator, "AB", {"A": 2**18, "B": 2**18})
    play(allocator, "a")
    assert allocator.dump() == (
        "phase dynamic, generation 0, collisions 0, late buffers 0, redundant frees 0\n"
        "arena        device  held  in use  peak use  slots  buffers\n"
        "all-gather   cpu     1.00    1.00      2.00      1        1\n"
        "named (MiB)          1.00    1.00      2.00      1        1"
    )


# Any trace


class Mirror:
    """Drives a pool, with freed memory poisoned, and checks that what is in use holds what was written."""

    def __init__(self, pool: TracePoolAllocator) -> None:
        self.pool = pool
        self.expected: dict[int, tuple[torch.Tensor, float]] = {}
        self._stamp = 0.0

    def toggle(self, key: int, what: BufferSpec) -> None:
        if key in self.expected:
            self.expected.pop(key)[0].fill_(float("nan"))
            self.pool.free(key)
        else:
            tensor = self.pool.allocate(key, what)
            self._stamp += 1.0
            tensor.fill_(self._stamp)
            self.expected[key] = (tensor, self._stamp)
        for tensor, stamp in self.expected.values():
            assert bool((tensor == stamp).all())

    def free_all(self) -> None:
        for key in list(self.expected):
            self.toggle(key, spec(0))


@given(
    specs=st.lists(
        st.tuples(
            st.integers(1, 20),
            st.sampled_from([torch.float32, torch.bfloat16]),
            st.sampled_from([ALL_GATHER, REDUCE_SCATTER, None]),
        ),
        min_size=1,
        max_size=8,
    ),
    data=st.data(),
)
def test_no_two_buffers_in_use_share_bytes(specs: list[tuple[int, torch.dtype, str]], data: st.DataObject) -> None:
    events = data.draw(st.lists(st.integers(0, len(specs) - 1), max_size=40))
    pool = TracePoolAllocator()
    mirror = Mirror(pool)
    for repetition in range(4):
        for key in events:
            mirror.toggle(key, spec(*specs[key]))
        mirror.free_all()
        if repetition == 0:
            pool.plan()
        if repetition == 1:
            pool.release()
        if repetition == 2:
            pool.reset()
    stats = pool.stats()
    assert (stats.live_bytes, stats.collisions, stats.late_keys) == (0, 0, 0)


@given(data=st.data())
def test_another_order_raises_rather_than_share(data: st.DataObject) -> None:
    """Whatever is done after the plan: a buffer in use is never written by another, and what can't be raises."""
    events = st.lists(st.integers(0, 7), max_size=30)
    pool = TracePoolAllocator()
    mirror = Mirror(pool)
    for key in data.draw(events):
        mirror.toggle(key, spec(key + 1))
    mirror.free_all()
    pool.plan()
    collisions = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for key in data.draw(events):
            try:
                mirror.toggle(key, spec(key + 1))
            except RuntimeError:
                collisions += 1
    assert pool.stats().collisions == collisions


def test_backward_threads_use_it_too() -> None:
    """Autograd calls hooks on threads of its own."""
    pool = planned("Aa")
    thread = threading.Thread(target=lambda: play(pool, "A"))
    thread.start()
    thread.join()
    assert pool.is_live("A")
