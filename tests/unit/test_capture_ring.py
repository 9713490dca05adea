"""The ring: an allocator that never overlaps, and two real processes round shared memory."""

import multiprocessing
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.capture.intake import Intake
from actors.capture.ring import ALIGNMENT, RingAllocator, RingMemory, RingProducer, aligned, available_bytes
from actors.capture.tap import Part, Request, Tap, WrongStates, block_bytes
from actors.capture.wire import ChannelClosed, Listener, connect
from storage.errors import ConfigError, ResourceError
from storage.layout import Layout

LAYOUT = Layout((2, 4, "final", "final_normed"), hidden_size=64, dtype="bfloat16")


@settings(max_examples=200, deadline=None)
@given(
    pages=st.integers(1, 12),
    steps=st.lists(st.one_of(st.just("free"), st.integers(1, 6 * ALIGNMENT)), max_size=60),
)
def test_blocks_never_overlap_and_an_empty_ring_takes_anything_that_fits(pages, steps):
    ring = RingAllocator(pages * ALIGNMENT)
    held = []
    for step in steps:
        if step == "free":
            if held:
                held.pop(0)
                ring.give_back()
            continue
        offset = ring.take(step)
        if offset is None:
            assert held or aligned(step) > ring.size
            continue
        end = offset + aligned(step)
        assert 0 <= offset < end <= ring.size
        assert all(end <= a or b <= offset for a, b in held)
        held.append((offset, end))


def test_a_containers_limit_counts_where_it_is_less_than_the_hosts(tmp_path, monkeypatch):
    monkeypatch.setattr("actors.capture.ring.CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    assert available_bytes() == 100_000
    with pytest.raises(ResourceError):
        RingMemory.create(1 << 20)
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() > 1 << 20


def test_too_little_memory_is_an_error_with_numbers_and_not_a_bus_error():
    with pytest.raises(
        ResourceError, match=r"no 1099511627776 MiB of shared memory .* \d+ MiB are available"
    ):
        RingMemory.create(1 << 60)


class Collected:
    def __init__(self):
        self.rows, self.lost_reasons, self.got = [], [], threading.Event()

    def put(self, rid, start, states, ids):
        self.rows.append((rid, start, [s.copy() for s in states], ids.copy()))
        if rid.endswith("last"):
            self.got.set()

    def lost(self, rid, reason):
        self.lost_reasons.append(reason)

    def found(self, kind, finding):
        pass


def rows_like(seed, n):
    import torch

    return torch.randn(n, 64, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def producer(address, token, forwards, packed):
    """A scheduler process's part of capture, without a model."""
    import torch

    channel = connect(address, token, {"pid": os.getpid(), "dp_rank": 0, "tp_rank": 0})
    channel.send({"ring": True})
    message, descriptor = channel.receive()
    memory = RingMemory(descriptor, message["size"])
    tap_holder = []
    ring = RingProducer(channel, memory, lambda m: tap_holder[0].send({"fenced": m["fence"]}))
    tap = Tap(LAYOUT, ring, channel, "cpu")
    tap_holder.append(tap)
    for i in range(forwards):
        n = 3 + i % 50
        states = [rows_like(4 * i + k, n + 2) for k in range(4)]  # two rows of padding
        collected = [Part([0, 1], torch.cat(states[:2], dim=1))]
        if not packed:
            collected = [Part([1], states[1]), Part([0], states[0])]
        rid = f"hs:{i}:last" if i == forwards - 1 else f"hs:{i}"
        requests = [Request(rid, 10, n - 1, 0), Request("hs:other", 0, 1, n - 1)]
        parts = [*collected, Part([2], states[2]), Part([3], states[3])]
        tap.take(requests, parts, torch.arange(n + 2))
    threading.Event().wait(20 if forwards else 0)


def run_producer(intake, *args):
    process = multiprocessing.get_context("spawn").Process(
        target=producer, args=(intake.address, intake.token, *args), daemon=True
    )
    process.start()
    return process


@pytest.mark.parametrize("packed", [True, False])
def test_two_processes_many_times_round_the_ring(packed):
    gone = threading.Event()
    intake = Intake(LAYOUT, 3 * block_bytes(LAYOUT, 52), lambda said: gone.set())
    sink, forwards = Collected(), 60
    for i in range(forwards):
        intake.route(f"hs:{i}", sink)
    intake.route(f"hs:{forwards - 1}:last", sink)
    process = run_producer(intake, forwards, packed)
    try:
        assert sink.got.wait(60)
        assert len(sink.rows) == forwards
        for i, (_, start, states, ids) in enumerate(sink.rows):
            n = 3 + i % 50
            assert start == 10
            assert np.array_equal(ids, np.arange(n - 1))
            for k, state in enumerate(states):
                expected = rows_like(4 * i + k, n + 2)[: n - 1]
                assert np.array_equal(state.view(np.int16), expected.view(__import__("torch").int16).numpy())
        intake.fence().result(30)
        process.kill()
        assert gone.wait(30)
    finally:
        process.kill()
        process.join()
        intake.close()


def test_several_threads_share_a_forward_and_all_are_done_before_the_ring_is_written_again(monkeypatch):
    monkeypatch.setattr("actors.capture.intake.PUT_ROWS", 8)
    gone = threading.Event()
    intake = Intake(LAYOUT, 3 * block_bytes(LAYOUT, 52), lambda said: gone.set(), threads=3)
    sink, forwards = Collected(), 60
    for rid in [*(f"hs:{i}" for i in range(forwards - 1)), f"hs:{forwards - 1}:last"]:
        intake.route(rid, sink)
    process = run_producer(intake, forwards, True)
    try:
        assert sink.got.wait(60)
        intake.fence().result(30)
    finally:
        process.kill()
        process.join()
        intake.close()
    for i in range(forwards):
        rid, n = f"hs:{i}" + (":last" if i == forwards - 1 else ""), 3 + i % 50
        parts = sorted((row for row in sink.rows if row[0] == rid), key=lambda row: row[1])
        assert [row[1] for row in parts] == list(range(10, 10 + n - 1, 8))
        assert np.array_equal(np.concatenate([row[3] for row in parts]), np.arange(n - 1))
        for k in range(4):
            expected = rows_like(4 * i + k, n + 2)[: n - 1].view(__import__("torch").int16).numpy()
            assert np.array_equal(np.concatenate([row[2][k] for row in parts]).view(np.int16), expected)


def test_a_put_that_fails_ends_the_engine_after_the_others_are_done():
    said = []
    gone = threading.Event()
    intake = Intake(LAYOUT, 3 * block_bytes(LAYOUT, 52), lambda s: (said.append(s), gone.set()), threads=2)

    class Broken(Collected):
        def put(self, rid, start, states, ids):
            raise ValueError("no room")

    good = Collected()
    intake.route("hs:0:last", Broken())
    intake.route("hs:other", good)
    process = run_producer(intake, 1, True)
    try:
        assert gone.wait(60)
        assert "draining its ring failed: no room" in said[0]
        assert len(good.rows) == 1
    finally:
        process.kill()
        process.join()
        intake.close()


def test_a_fence_is_passed_only_after_everything_before_it_was_drained():
    intake = Intake(LAYOUT, 3 * block_bytes(LAYOUT, 52), lambda said: None)
    sink = Collected()
    intake.route("hs:other", sink)
    intake.route("hs:29:last", sink)
    process = run_producer(intake, 30, True)
    try:
        assert sink.got.wait(60)
        intake.fence().result(30)
        assert sum(rid == "hs:other" for rid, *_ in sink.rows) == 30
    finally:
        process.kill()
        process.join()
        intake.close()


class Pair:
    """Both ends in this process, with an actor that drains only when told to."""

    def __init__(self, pages):
        self.listener = Listener()
        self.memory = RingMemory.create(pages * ALIGNMENT)
        here = connect(self.listener.address, self.listener.token, {"pid": 1})
        self.actor, _ = self.listener.accept()
        self.ring = RingProducer(here, self.memory, lambda m: None)
        self.channel = here


def test_a_full_ring_sounds_the_alarm_waits_on_and_goes_on_when_drained():
    pair = Pair(2)
    assert pair.ring.take(2 * ALIGNMENT) == 0
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(pair.ring.take(ALIGNMENT, alarm_s=0.05)))
    waiting.start()
    message, _ = pair.actor.receive()
    assert "has been full" in message["alarm"]
    assert taken == []
    pair.actor.send({"free": 1})
    waiting.join(30)
    assert taken == [0]


def test_a_dead_actor_frees_the_forward_that_waits_for_room():
    pair = Pair(1)
    assert pair.ring.take(ALIGNMENT) == 0
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(pair.ring.take(ALIGNMENT)))
    waiting.start()
    pair.actor.close()
    waiting.join(30)
    assert taken == [None]


def test_a_block_larger_than_the_ring_is_an_error_and_not_a_wait():
    with pytest.raises(ConfigError, match=r"lower engine\.args\.chunked_prefill_size"):
        Pair(1).ring.take(ALIGNMENT + 1)


def test_states_of_another_number_shape_or_type_are_not_taken():
    import torch

    pair = Pair(64)
    tap = Tap(LAYOUT, pair.ring, pair.channel, "cpu")
    good, request, ids = rows_like(0, 3), [Request("hs:1", 0, 3, 0)], torch.arange(3)
    last = [Part([2], good), Part([3], good)]
    for parts in (
        last,
        [Part([0], good), *last],
        [Part([0], good), Part([0], good), *last],
        [Part([0], good), Part([1], good[:2]), *last],
        [Part([0], good), Part([1], good.float()), *last],
        [Part([0, 1], torch.cat([good] * 3, dim=1)), *last],
        [Part([0, 1], torch.cat([good] * 2, dim=1)), Part([2], None), Part([3], good)],
    ):
        with pytest.raises(WrongStates):
            tap.take(request, parts, ids)


def test_a_peer_that_does_not_know_the_token_is_not_let_in():
    listener = Listener()
    stranger = connect(listener.address, "guess", {"pid": 1})
    friend = connect(listener.address, listener.token, {"pid": 2})
    _, greeting = listener.accept()
    assert greeting == {"pid": 2}
    with pytest.raises(ChannelClosed):
        stranger.receive()
    friend.close()
