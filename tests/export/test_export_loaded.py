"""What comes out of each export, by the trainer's own reading code, is what the dump holds."""

from __future__ import annotations

import importlib
import json
import mmap
import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_dumps import IDS, LENGTHS

from cluster.cli import run_cli
from storage.reader import Dump, open_dump

BOUNDARIES = (2, 15, 27)


@pytest.fixture(scope="session")
def dump(dump_url: str) -> Dump:
    return open_dump(dump_url)


def exported(dump_url: str, dest: Path, form: str, *options: str) -> Path:
    assert run_cli(["export", dump_url, "--to", form, str(dest), *options]) == 0
    return dest / "train"


def flat(dump: Dump, number: int) -> torch.Tensor:
    """[T, 3H]: low, mid and high of each token, built the other way round than the exports do."""
    return torch.cat([dump[number].states(b) for b in BOUNDARIES], dim=-1)


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert torch.equal(got, wanted)


def test_speculators(dump: Dump, dump_url: str, tmp_path: Path, trainers: Path) -> None:
    data = importlib.import_module("speculators.train.data")
    folder = exported(dump_url, tmp_path, "speculators")
    dataset = data.ArrowDataset(max_len=128, datapath=folder, on_missing="raise")
    assert dataset.approx_lengths == list(LENGTHS)
    for i, item in enumerate(dataset[i] for i in range(len(LENGTHS))):
        same(item["input_ids"], dump[i].token_ids)
        same(item["hidden_states"], flat(dump, i))
        same(item["verifier_last_hidden_states"], dump[i].states("final"))
        same(item["loss_mask"], dump[i].loss_mask.long())
    assert not list(folder.rglob("*.lock"))


def test_speculators_batches(dump: Dump, dump_url: str, tmp_path: Path, trainers: Path) -> None:
    data = importlib.import_module("speculators.train.data")
    shift = importlib.import_module("speculators.models.eagle3.data").shift_batch
    folder = exported(dump_url, tmp_path, "speculators")
    dataset = data.ArrowDataset(max_len=64, datapath=folder, on_missing="raise")
    batch = data.CollateFn(64, 16, preprocess=shift)([dataset[0], dataset[2]])
    assert batch["error_records"] == 0
    same(batch["hidden_states"][0, :4], flat(dump, 0)[:-1])
    same(batch["verifier_last_hidden_states"][0, 4:33], dump[2].states("final")[1:])
    assert batch["document_ids"][0].tolist() == [0] * 4 + [1] * 29 + [-1] * 31


def test_specforge(dump: Dump, dump_url: str, tmp_path: Path, trainers: Path) -> None:
    eagle3 = importlib.import_module("specforge.algorithms.eagle3.data")
    store = importlib.import_module("specforge.runtime.data_plane.feature_store")
    reader = importlib.import_module("specforge.runtime.data_plane.offline_reader")
    folder = exported(dump_url, tmp_path, "specforge")
    refs = reader.OfflineManifestReader(str(folder), validate_files=True).read()
    assert sum(ref.num_tokens for ref in refs) == sum(LENGTHS)
    for i, ref in enumerate(refs):
        raw = store.load_feature_file(ref.feature_store_uri.removeprefix("file://"))
        item = eagle3.normalize_offline_sample(raw, max_len=2048)
        same(item["hidden_state"][0], flat(dump, i))
        same(item["target"][0], dump[i].states("final_normed"))
        same(item["input_ids"][0], dump[i].token_ids)
        same(item["loss_mask"][0, :-1], dump[i].loss_mask.long()[:-1])


def test_modelopt(dump: Dump, dump_url: str, tmp_path: Path, trainers: Path) -> None:
    utils = importlib.import_module("modelopt.torch.speculative.eagle.utils")
    folder = exported(dump_url, tmp_path, "modelopt")
    files = sorted(folder.rglob("*.pt"))
    dataset = utils.OfflineSupervisedDataset(files, answer_only_loss=True)
    for i, item in enumerate(dataset[i] for i in range(len(LENGTHS))):
        same(item["input_ids"], dump[i].token_ids)
        same(item["aux_hidden_states"], flat(dump, i))
        same(item["base_model_hidden_states"], dump[i].states("final_normed"))
        same(item["loss_mask"], dump[i].loss_mask.long())
        assert item["base_hidden_prenorm"] is False
        assert torch.load(files[i], weights_only=True)["conversation_id"] == IDS[i]
    batch = utils.EagleOfflineDataCollator(40)([dataset[0], dataset[2]])
    same(batch["base_model_outputs"]["aux_hidden_states"][1, :30], flat(dump, 2))


@pytest.fixture
def angelslim(trainers: Path) -> Iterator[Any]:
    """AngelSlim's offline dataset. Its packages' own __init__ files import modules that the wheel leaves out."""
    packages = "angelslim", "angelslim.compressor", "angelslim.compressor.speculative"
    for name in packages:
        package = types.ModuleType(name)
        package.__path__ = [str(trainers / name.replace(".", "/"))]
        sys.modules[name] = package
    train = types.ModuleType(f"{packages[-1]}.train")
    train.__path__ = [str(trainers / "angelslim/compressor/speculative/train")]
    data = types.ModuleType(f"{train.__name__}.data")
    data.__path__ = [f"{train.__path__[0]}/data"]
    builders = types.ModuleType(f"{data.__name__}.dataset_builder")
    builders.__path__ = [f"{data.__path__[0]}/dataset_builder"]
    sys.modules.update({module.__name__: module for module in (train, data, builders)})
    yield importlib.import_module(f"{builders.__name__}.offline_dataset_builder")
    for name in [name for name in sys.modules if name.split(".")[0] == "angelslim"]:
        del sys.modules[name]


def test_angelslim(dump: Dump, dump_url: str, tmp_path: Path, angelslim: Any) -> None:
    folder = exported(dump_url, tmp_path, "angelslim")
    dataset = angelslim.OfflineLLMDatasetBuilder().build_dataset(str(folder))
    assert len(dataset) == len(LENGTHS)
    for i in range(len(dataset)):
        item = dataset[i]
        same(item["input_ids"][0], dump[i].token_ids)
        same(item["hidden_states"][0], flat(dump, i))
        same(item["target_hiddens"][0], dump[i].states("final_normed"))
        same(item["loss_mask"][0], dump[i].loss_mask.long())


def test_eagle_loads_every_file_below_the_folder(dump: Dump, dump_url: str, tmp_path: Path) -> None:
    folder = exported(dump_url, tmp_path, "eagle")
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert len(paths) == len(LENGTHS)
    for i, path in enumerate(sorted(paths)):
        item = torch.load(path, weights_only=True)
        same(item["input_ids"], dump[i].token_ids)
        same(item["hidden_state"], dump[i].states("final_normed").to(torch.float16))
        same(item["loss_mask"], dump[i].loss_mask.long())


def test_deepspec(dump: Dump, dump_url: str, tmp_path: Path) -> None:
    """A reader after DeepSpec's description of its cache, version 2."""
    folder = exported(dump_url, tmp_path, "deepspec")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["version"] == 2
    assert manifest["target_layer_ids"] == [1, 14, 26]
    assert manifest["index_record_size"] == struct.calcsize("<QIIQQQQQ") == 56
    assert manifest["num_shards"] == len(manifest["shards"])
    assert manifest["target_model_name_or_path"] == "tiny/llama"
    index = (folder / "samples.idx").read_bytes()
    assert len(index) == 56 * manifest["num_samples"] == 56 * len(LENGTHS)
    for i in range(manifest["num_samples"]):
        sample_id, shard, length, *offsets = struct.unpack_from("<QIIQQQQQ", index, 56 * i)
        assert (sample_id, length) == (i, LENGTHS[i])
        file_name = manifest["shards"][shard]["file_name"]
        with open(folder / file_name, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        h = manifest["hidden_size"]
        ids, attention, mask, aux, last = (
            np.frombuffer(data, dtype, count, offset)
            for dtype, count, offset in zip(
                ("<i4", "u1", "u1", "<u2", "<u2"), (length, length, length, 3 * length * h, length * h), offsets,
                strict=True,
            )
        )  # fmt: skip
        assert ids.tolist() == dump[i].token_ids.tolist()
        assert attention.all()
        assert mask.tolist() == dump[i].loss_mask.int().tolist()
        same(torch.from_numpy(aux.copy()).view(torch.bfloat16).view(length, 3 * h), flat(dump, i))
        same(
            torch.from_numpy(last.copy()).view(torch.bfloat16).view(length, h), dump[i].states("final_normed")
        )


def test_deepspec_over_several_shards(
    dump: Dump, dump_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from storage.export.deepspec import DeepSpec

    monkeypatch.setattr(DeepSpec, "part_bytes", 2000)
    test_deepspec(dump, dump_url, tmp_path)
    assert len(list((tmp_path / "train").glob("shard-*.bin"))) > 2
