import json

from actors.figures import Figures
from actors.run_messages import MemberStatus
from cluster.statistics import STATISTICS_KEY, StateStatisticsFile, float8_errors
from storage.files import Store

STATES = {"2": {"tokens": 5, "mean": 0.0, "std": 1.0, "norm_quantiles": {"0.5": 3.0}}}


def engine(name="engine-0", alarms=0, last="", states=STATES):
    return MemberStatus(name, "node", figures=Figures(states=states, alarms=alarms, last_alarm=last))


def kept(store):
    return json.loads(store.read(STATISTICS_KEY))


def test_what_engines_of_several_invocations_saw_is_kept(tmp_path):
    store = Store(str(tmp_path))
    for invocation in ("first", "second"):
        file = StateStatisticsFile(store, invocation)
        file.take([engine(), MemberStatus("engine-1", "node")])
        file.write()
    assert kept(store) == {
        name: {"engine-0": {"states": STATES, "alarms": 0}} for name in ("first", "second")
    }


def test_nothing_is_written_where_no_states_were_seen(tmp_path):
    store = Store(str(tmp_path))
    file = StateStatisticsFile(store, "synthetic")
    file.take([engine(states={})])
    file.write()
    assert not store.exists(STATISTICS_KEY)


def test_new_alarms_are_said_once_with_the_last_of_them(tmp_path):
    file = StateStatisticsFile(Store(str(tmp_path)), "run")
    assert file.take([engine()]) == []
    (line,) = file.take([engine(alarms=2, last="sample a: state 2, token 5: norm 1e9")])
    assert line == "engine-0: 2 tokens with unusual norms, the last in sample a: state 2, token 5: norm 1e9"
    assert file.take([engine(alarms=2, last="sample a")]) == []


def test_it_is_written_now_and_then_while_the_run_goes_on(tmp_path):
    store, now = Store(str(tmp_path)), [0.0]
    file = StateStatisticsFile(store, "run", clock=lambda: now[0])
    file.take([engine()])
    assert not store.exists(STATISTICS_KEY)
    now[0] = 61.0
    file.take([engine()])
    assert kept(store)["run"]["engine-0"]["states"] == STATES


def test_the_worst_engine_s_error_of_8_bit_floats_is_shown_for_each_state(tmp_path):
    store = Store(str(tmp_path))
    assert float8_errors(store) == []
    file = StateStatisticsFile(store, "run")
    for name, median in (("engine-0", 0.026), ("engine-1", 0.031), ("engine-2", 0.027)):
        quantiles = {"0.5": median, "0.99": median + 0.01}
        file.take([engine(name, states={"2": {**STATES["2"], "float8_error_quantiles": quantiles}})])
    file.write()
    assert float8_errors(store) == ["2: error a token 0.0310 (median), 0.0410 (p99)"]
