import pytest

from actors.capture.boundary import boundary_table, capture_spec, resolve_boundaries, setter_ids
from storage.errors import ConfigError


def spec(requested, **more):
    settings = {"final": False, "final_normed": False, "num_layers": 30, "hidden_size": 8} | more
    return capture_spec(requested, dtype="bfloat16", chunk_rows=32, shard_rows=64, **settings)


def test_boundary_outside_the_model_names_it_and_the_range():
    with pytest.raises(ConfigError, match=r"^boundary 99: the model has 30 layers, boundaries are 0\.\.30$"):
        resolve_boundaries([2, 99], 30)
    with pytest.raises(ConfigError, match="boundary -1"):
        resolve_boundaries([-1], 30)


@pytest.mark.parametrize("wrong", [[True], ["2"], [2.0]])
def test_boundaries_are_whole_numbers(wrong):
    with pytest.raises(ConfigError, match="isn't a whole number"):
        resolve_boundaries(wrong, 30)


def test_repeated_boundaries_and_unknown_presets_are_refused():
    with pytest.raises(ConfigError, match="2 is there more than once"):
        resolve_boundaries([2, 5, 2], 30)
    with pytest.raises(ConfigError, match="'eagle2' isn't a preset"):
        resolve_boundaries("eagle2", 30)


def test_eagle3_is_what_sglang_reads_by_default():
    assert resolve_boundaries("eagle3", 61) == ((2, 30, 58), False)
    assert resolve_boundaries("eagle3", 30) == ((2, 15, 27), False)


def test_eagle3_of_a_model_with_too_few_layers_says_so():
    with pytest.raises(ConfigError, match="N = 4"):
        resolve_boundaries("eagle3", 4)


def test_boundary_n_means_final():
    assert resolve_boundaries([30, 3], 30) == ((3,), True)
    assert spec([30, 3]).layout.states == (3, "final")


def test_states_are_stored_boundaries_ascending_then_final_then_final_normed():
    assert spec([27, 0, 15], final=True, final_normed=True).layout.states == (
        0,
        15,
        27,
        "final",
        "final_normed",
    )


def test_nothing_to_capture_is_an_error():
    with pytest.raises(ConfigError, match="nothing to capture"):
        spec([])


def test_table_of_the_kimi_run_in_everybodys_numbers():
    rows = boundary_table(spec([3, 31, 59], num_layers=61, final=True, final_normed=True))
    assert [(r.state, r.hugging_face, r.sglang_id) for r in rows] == [
        (3, "hidden_states[3]", 2),
        (31, "hidden_states[31]", 30),
        (59, "hidden_states[59]", 58),
        ("final", "input of the final norm", None),
        ("final_normed", "hidden_states[61]", None),
    ]
    assert rows[0].layer == "output of layer 2"


def test_boundary_0_has_no_part_in_sglangs_collector():
    assert [r.sglang_id for r in boundary_table(spec([0, 1, 2]))] == [None, 0, 1]


def test_setter_ids_mean_the_output_of_a_layer():
    assert setter_ids([1, 2, 15]) == [0, 1, 14]
