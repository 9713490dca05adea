"""How far, how fast and what holds a run back, from made-up statuses; and what a person sees of it."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from actors.figures import EngineTimes, Figures
from actors.rows import Counts
from actors.run_messages import MemberStatus, Status
from cluster.lines import set_up_lines
from cluster.pace import Pacer, spoken_rate
from cluster.report import say
from cluster.watch import Watch, progress_line

GIB = 1 << 30


def status(captured: int = 0, committed: int = 0, pending: int = 50, **more: object) -> Status:
    engine = MemberStatus("engine-0", "n0", batches=2, tokens=900, done_samples=captured // 100)
    base = Status(
        counts=Counts(pending, 4, 6, committed // 100, 1, 0),
        tokens=10_000,
        committed_tokens=committed,
        captured_tokens=captured,
        stored_bytes=0,
        in_flight_bytes={"n0": GIB},
        in_flight_limit_bytes=8 * GIB,
        engines=(engine,),
        writers=(MemberStatus("writer-0", "n0", figures=Figures()),),
        events={},
        last_problem=None,
        paused=None,
    )
    return replace(base, **more)  # type: ignore[arg-type]


def second_look(full: bool, busy_s: float, ring_s: float, write_s: float, seal_s: float) -> str:
    """The bottleneck between a first status and one ten seconds later."""
    pacer = Pacer()
    engine = MemberStatus("engine-0", "n0", figures=Figures())
    writer = MemberStatus("writer-0", "n0", figures=Figures())
    pacer.look(status(engines=(engine,), writers=(writer,)), 0.0)
    engine = replace(engine, busy_s=busy_s, waiting_s=10 - busy_s, figures=Figures(ring_wait_s=ring_s))
    writer = replace(writer, figures=Figures(write_s=write_s, seal_s=seal_s))
    used = {"n0": 8 * GIB} if full else {"n0": GIB}
    return pacer.look(status(engines=(engine,), writers=(writer,), in_flight_bytes=used), 10.0).bottleneck


@pytest.mark.parametrize(
    ("look", "where"),
    [
        ((False, 10.0, 0.0, 1.0, 0.0), "engine"),
        ((False, 10.0, 3.0, 1.0, 0.0), "ring"),
        ((True, 4.0, 0.0, 9.0, 0.5), "writer"),
        ((True, 4.0, 0.0, 1.0, 9.0), "storage"),
        ((True, 4.0, 0.0, 1.0, 0.0), "object store"),
    ],
)
def test_the_bottleneck_is_what_the_others_wait_for(look, where):
    assert second_look(*look) == where


def test_a_paused_run_or_its_end_has_no_bottleneck():
    pacer = Pacer()
    pacer.look(status(), 0.0)
    assert pacer.look(status(paused="no space"), 10.0).bottleneck == "nothing"
    assert pacer.look(status(pending=0), 20.0).bottleneck == "nothing"


def test_rate_and_time_to_go_are_of_the_last_minute():
    pacer = Pacer()
    for second, captured in ((0, 0), (10, 1000), (80, 2400), (100, 3000), (120, 3600)):
        pace = pacer.look(status(captured), float(second))
    assert pace.tokens_per_s == pytest.approx((3600 - 2400) / 40)
    assert pace.left_s == pytest.approx((10_000 - 3600) / 30)


def test_a_resumed_run_counts_from_what_was_committed_before():
    pacer = Pacer()
    assert pacer.look(status(0, committed=4000), 0.0).done_tokens == 4000
    assert pacer.look(status(1000, committed=4500), 10.0).done_tokens == 5000


def test_another_coordinator_starts_the_rate_anew():
    pacer = Pacer()
    pacer.look(status(5000, committed=4000), 0.0)
    pacer.look(status(6000, committed=4000), 10.0)
    pace = pacer.look(status(100, committed=4000), 20.0)
    assert (pace.done_tokens, pace.tokens_per_s) == (4000, None)


def test_an_engine_waits_only_while_rows_are_pending():
    times = EngineTimes()
    times.look(0.0, ["a"], ["b"], rows_wait=True)
    times.look(3.0, ["b"], ["a"], rows_wait=False)
    times.look(5.0, [], ["a", "b"], rows_wait=False)
    assert (times.busy_s("a"), times.waiting_s("a")) == (3.0, 0.0)
    assert (times.busy_s("b"), times.waiting_s("b")) == (2.0, 3.0)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def watched(console: Console, json_logs: bool = False, seconds: int = 25) -> list[dict[str, object]]:
    clock = Clock()
    with Watch(json_logs, console, clock) as watch:
        for second in range(0, seconds, 5):
            clock.now_s = float(second)
            told = status(second * 100, events={"bad_states": 2}, last_problem="row 7: not finite")
            watch.update(told, {"n0": "gpu-a"}, {"engine-1": 31.0})
        say("a shard was sealed")
    return watch.timeline


def test_a_log_gets_a_structured_line_every_ten_seconds(capsys):
    timeline = watched(Console(file=io.StringIO(), force_terminal=False))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "tokens=1,000/10,000" in lines[0]
    assert "rate=100/s" in lines[0]
    assert "loading=engine-1" in lines[1]
    assert lines[1].endswith("retries: 2 bad_states; last problem: row 7: not finite")
    assert [point["captured_tokens"] for point in timeline] == [0, 500, 1000, 1500, 2000]


def test_the_timeline_ends_with_the_last_commit():
    clock = Clock()
    with Watch(console=Console(file=io.StringIO(), force_terminal=False), clock=clock) as watch:
        watch._every = 4
        watch.update(status(1000), {}, {})
        clock.now_s = 2.5
        watch.ended(status(10_000, committed=10_000))
        watch.ended(replace(status(0), task="answer"))
    assert [(point["s"], point["committed_tokens"]) for point in watch.timeline] == [(2.5, 10_000)]


def test_json_lines_are_objects_with_the_same_figures(capsys):
    watched(Console(file=io.StringIO(), force_terminal=True), json_logs=True)
    first, _, message = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["event"], first["done_tokens"], first["tokens_per_s"]) == ("progress", 1000, 100.0)
    assert first["engines"]["engine-0"]["rows"] == 10
    assert (message["event"], message["text"]) == ("message", "a shard was sealed")


def test_a_terminal_gets_a_live_view_and_lines_above_it():
    screen = io.StringIO()
    watched(Console(file=screen, force_terminal=True, width=120))
    shown = screen.getvalue()
    for what in ("tokens/s", "engine-0", "gpu-a", "loads for 31 s", "1.0 GiB of 8.0 GiB", "a shard was sealed",
                 "retries: 2 bad_states", "row 7: not finite"):  # fmt: skip
        assert what in shown, what
    assert "progress " not in shown


@pytest.fixture(autouse=True)
def _plain_lines():
    yield
    set_up_lines()


def test_the_capture_is_counted_anew_after_the_answers() -> None:
    pacer = Pacer()
    pacer.look(status(0, committed=900, task="answer"), 0.0)
    answering = pacer.look(status(500, committed=900, task="answer", answer_tokens=50), 10.0)
    assert spoken_rate(answering) == pytest.approx(5.0)
    assert progress_line(answering, {}).startswith("answering 14% said=50 rate=5/s")
    capturing = pacer.look(status(600, committed=0), 20.0)
    assert (capturing.done_tokens, capturing.tokens_per_s) == (600, None)
