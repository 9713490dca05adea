"""Which runs go on, by the names of a cluster's actors."""

from __future__ import annotations

from cluster.status import RunningRun, running_runs


def named(**namespaces: str) -> list[dict[str, str]]:
    return [
        {"namespace": space.replace("_", "-"), "name": name}
        for space, names in namespaces.items()
        for name in names.split()
    ]


def test_a_run_is_led_by_its_newest_coordinator():
    found = running_runs(named(hsdump_a="coordinator-9 coordinator-10 engine-1 engine-0 writer-0"))
    assert found == [RunningRun("a", "coordinator-10", ("engine-0", "engine-1"))]


def test_others_actors_arent_runs():
    assert running_runs(named(serve="coordinator-0", hsdump_b="engine-0")) == []


def test_several_runs_are_told_apart():
    runs = running_runs(named(hsdump_b="coordinator-0", hsdump_a="coordinator-0 engine-0"))
    assert [(run.run_id, run.engines) for run in runs] == [("a", ("engine-0",)), ("b", ())]
