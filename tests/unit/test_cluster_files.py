"""The files that make a cluster: what Ray, Docker's linter and KubeRay's documentation accept."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.runtime_env import RuntimeEnv

from cluster.config import LimitsConfig

ROOT = Path(__file__).parent.parent.parent
CLUSTERS = ["ray_config.yaml", "cluster/ray_config.onprem.yaml"]


def read(name: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return tree


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home with a token: Ray wants files that are to be copied to exist."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("0" * 64)


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_accepts_the_cluster_file(name: str, token: None):
    config = read(name)
    schema = json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text())
    jsonschema.validate(config, schema)
    validate_config(prepare_config(config))


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_node_starts_with_the_token_and_the_dashboard_on_loopback(name: str):
    config = read(name)
    starts = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    starts = [line for line in starts if "ray start" in line]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in line for line in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]
    assert "RAY_preallocate_plasma_memory=1" in starts[1]
    assert any(path.endswith("/.ray/auth_token") for path in config["file_mounts"])


def test_a_gpu_nodes_shared_memory_holds_its_object_store():
    config = read("ray_config.yaml")
    shm = re.search(r"--shm-size=(\d+)g", " ".join(config["docker"]["worker_run_options"]))
    store = re.search(r"--object-store-memory=(\d+)", " ".join(config["worker_start_ray_commands"]))
    assert shm
    assert store
    assert int(store.group(1)) < 0.95 * int(shm.group(1)) * 2**30  # Ray takes 95 % of it at most
    job = read("cluster/rayjob.yaml")["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    volume = next(v for v in job["template"]["spec"]["volumes"] if v["name"] == "shm")
    size = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) * 2**30
    assert int(job["rayStartParams"]["object-store-memory"]) < 0.95 * size


def test_a_stopped_job_has_longer_than_its_work_in_flight_needs():
    tree = read("cluster/runtime_env.yaml")
    given = RuntimeEnv(**tree)  # raises on what isn't a field
    assert float(given["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > LimitsConfig().drain_timeout_s + 30
    job = yaml.safe_load(read("cluster/rayjob.yaml")["spec"]["runtimeEnvYAML"])
    assert job["env_vars"] == tree["env_vars"]


def test_what_a_job_uploads_is_small(tmp_path: Path):
    """All that git has, less what is excluded: far below Ray's limit."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True
    ).stdout.splitlines()
    excluded = tuple(e.strip("/") + "/" for e in read("cluster/runtime_env.yaml")["excludes"] if "*" not in e)
    assert all((ROOT / folder).is_dir() for folder in excluded)
    sent = [n for n in names if not n.startswith(excluded) and (ROOT / n).exists()]
    assert "cluster/__main__.py" in sent
    assert sum((ROOT / n).stat().st_size for n in sent) < 5 << 20


def test_the_dockerfile_passes_its_linter():
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, ROOT / "Dockerfile"], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    assert len((ROOT / "Dockerfile").read_text().splitlines()) < 25


# Fields of the ray.io/v1 API reference of KubeRay that the manifest uses, and what lies below them.
POD = {"containers": ..., "volumes": ...}
GROUP = {"rayStartParams": ..., "template": {"spec": POD}}
RAY_JOB = {
    "entrypoint": str,
    "submissionMode": "HTTPMode K8sJobMode InteractiveMode SidecarMode",
    "backoffLimit": int,
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "runtimeEnvYAML": str,
    "rayClusterSpec": {
        "rayVersion": str,
        "authOptions": {"mode": "token disabled"},
        "enableInTreeAutoscaling": bool,
        "autoscalerOptions": {"version": "v1 v2", "idleTimeoutSeconds": int},
        "headGroupSpec": GROUP,
        "workerGroupSpecs": [
            GROUP | {"groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int}
        ],
    },
}


def unknown(value: Any, fields: Any, path: str) -> list[str]:
    """Where ``value`` has something that ``fields`` doesn't."""
    if isinstance(fields, dict):
        found = [f"{path}.{k} is unknown" for k in value if k not in fields]
        return found + [e for k in value if k in fields for e in unknown(value[k], fields[k], f"{path}.{k}")]
    if isinstance(fields, list):
        return [e for i, item in enumerate(value) for e in unknown(item, fields[0], f"{path}[{i}]")]
    if isinstance(fields, str):
        return [] if value in fields.split() else [f"{path} is {value}, not one of {fields}"]
    return [] if fields is ... or isinstance(value, fields) else [f"{path} is {value!r}, not {fields}"]


def test_the_ray_job_has_only_documented_fields():
    job = read("cluster/rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert unknown(job["spec"], RAY_JOB, "spec") == []
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(v, str) for v in group["rayStartParams"].values())
        spec = group["template"]["spec"]
        mounted = {m["name"] for c in spec["containers"] for m in c["volumeMounts"]}
        assert mounted == {v["name"] for v in spec["volumes"]}
        assert {c["image"] for c in spec["containers"]} == {read("ray_config.yaml")["docker"]["image"]}
