from types import SimpleNamespace

import pytest

from actors.capture import adapter


@pytest.mark.parametrize("version", ["0.5.17", "0.5.20", "0.5.23", "0.5.23.post1"])
def test_releases_that_the_suite_has_seen_need_no_warning(version):
    assert adapter.untried(version) is None


@pytest.mark.parametrize("version", ["0.5.24", "0.6.0rc1", "1.0.0", "0.5.9", "0.5.16.post3"])
def test_another_release_is_used_with_a_warning_that_names_it(version):
    assert f"SGLang {version} hasn't been tried" in str(adapter.untried(version))


def test_the_replica_argument_is_the_one_that_generate_takes():
    async def newer(input_ids, routed_dp_rank=None, data_parallel_rank=None): ...

    async def older(input_ids, data_parallel_rank=None): ...

    assert adapter.replica_argument(newer) == "routed_dp_rank"
    assert adapter.replica_argument(older) == "data_parallel_rank"


def test_a_layer_without_a_boundary_object_has_no_entry():
    assert adapter.layer_entry(SimpleNamespace(attn_boundary=None)) is None
    stage = SimpleNamespace(prepare=lambda: None, capture_output=lambda: None)
    assert adapter.layer_entry(SimpleNamespace(attn_boundary=stage)) is stage
