"""Trains small EAGLE-3 drafters with speculators from what a dump holds, and from what it must not hold.

    hsdump export DUMP --to speculators EXPORT --boundaries 2,15,27 --split 0.12 --draft-vocab-size 2048
    hsdump export DUMP --to speculators WRONG --boundaries 3,16,28 --split 0.12
    python examples/drafter/train.py MODEL EXPORT WRONG --runs RUNS --results drafter.json

Five arms, each from the same seeds and for as many steps, all evaluated on the captured states of the held-out samples:

    captured      what was captured: boundaries 2, 15, 27 and the final state
    shuffled      boundaries of another sample: shows how far token ids alone get
    final_wrong   the target's last state after the final norm, which the trainer then norms again
    off_by_one    trained one boundary further, 3, 16, 28
    float8        as captured, rounded as a dump with `capture.dtype: float8` rounds them

It is speculators' own model, dataset, packing, collation, shift, loss and training loop. Its trainer assumes an
accelerator; `on_the_cpu` is what has to be put in its place. A run that is done has a file in RUNS and isn't repeated.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from loguru import logger as loguru
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train import trainer as trainer_module
from speculators.train.cli import create_transformer_layer_config
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from speculators.train.trainer import Trainer, TrainerConfig
from torch.utils.data import DataLoader, Dataset
from transformers.utils.logging import disable_progress_bar

from storage.float8 import rounded

ARMS = ("captured", "shuffled", "final_wrong", "off_by_one", "float8")
BATCH_TOKENS = 512
NUM_BOUNDARIES = 3
Item = dict[str, Any]


class Arm(Dataset[Item]):
    """The training samples as one arm sees them.

    Args:
        name: one of `ARMS`.
        right: the export of the boundaries that the drafter is served with.
        wrong: the export of the neighbouring boundaries; the same rows.
        norm: the target's final norm.
    """

    def __init__(self, name: str, right: ArrowDataset, wrong: ArrowDataset, norm: torch.nn.Module) -> None:
        self._name, self._right, self._wrong, self._norm = name, right, wrong, norm
        self.approx_lengths = right.approx_lengths

    def __len__(self) -> int:
        return len(self._right)

    def __getitem__(self, index: int) -> Item:
        item: Item = self._right[index]
        if self._name == "shuffled":
            other = self._right[(index + len(self) // 2) % len(self)]["hidden_states"]
            item["hidden_states"] = other[torch.arange(len(item["input_ids"])) % len(other)]
        elif self._name == "final_wrong":
            with torch.no_grad():
                item["verifier_last_hidden_states"] = self._norm(item["verifier_last_hidden_states"].float())
        elif self._name == "off_by_one":
            item["hidden_states"] = self._wrong[index]["hidden_states"]
        elif self._name == "float8":
            final = item["verifier_last_hidden_states"]
            boundaries = item["hidden_states"]  # [T, 3 * H], and each state has scales of its own
            item["hidden_states"] = rounded(boundaries.reshape(-1, final.shape[-1])).reshape(boundaries.shape)
            item["verifier_last_hidden_states"] = rounded(final)
        return item


class Losses(logging.Handler):
    """Keeps the training loss of each step, which the trainer logs."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Takes one step's record."""
        if isinstance(record.msg, dict) and "train" in record.msg:
            self.values.append(float(record.msg["train"]["loss"]))


def on_the_cpu() -> None:
    """Replaces what speculators' trainer asks an accelerator for."""
    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.accelerator, "current_accelerator", lambda *args, **kwargs: torch.device("cpu")),
        (torch.accelerator, "synchronize", lambda *args, **kwargs: None),
        (trainer_module, "get_local_rank", lambda: "cpu"),
        (trainer_module, "tqdm", lambda batches, **kwargs: batches),
    ]
    for module, name, function in replacements:
        setattr(module, name, function)


def make_model(model: str, export: Path, draft_vocab_size: int) -> Eagle3DraftModel:
    """A fresh drafter: one layer in the target's shape, with the export's vocabulary and layer ids."""
    import numpy as np

    record = json.loads((export / "export.json").read_text())
    maps = {
        name: torch.from_numpy(np.load(export / f"train/{name}-{draft_vocab_size}.npy"))
        for name in ("d2t", "t2d")
    }
    layer = create_transformer_layer_config(
        verifier_name_or_path=model,
        num_layers=1,
        draft_arch="llama",
        hidden_act=None,
        sliding_window=2048,
        full_attention_indices=[0],
    )
    return Eagle3DraftModel.from_training_args(
        layer,
        **maps,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=True,
        ttt_steps=1,
        verifier_name_or_path=model,
        target_layer_ids=record["trainer_layer_ids"],
        draft_attn_impl="sdpa",
    )


def loader(samples: Any, hidden_size: int, seed: int) -> DataLoader[Item]:
    """Packed batches of `BATCH_TOKENS`, as speculators makes them, without pinned memory."""
    return DataLoader(
        samples,
        batch_sampler=MultipackDistributedBatchSamplerV2(
            batch_max_length=BATCH_TOKENS, lengths=samples.approx_lengths, num_replicas=1, rank=0, seed=seed
        ),
        collate_fn=CollateFn(
            BATCH_TOKENS, hidden_size, NUM_BOUNDARIES, dtype=torch.float32, preprocess=shift_batch
        ),
    )


def opened(export: Path, split: str) -> ArrowDataset:
    """One split of an export through speculators' dataset."""
    return ArrowDataset(
        max_len=BATCH_TOKENS, datapath=export / split, on_missing="raise", hidden_states_dtype=torch.float32
    )


def run(args: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    """Trains one drafter and evaluates it on the captured states of the held-out samples."""
    torch.manual_seed(seed)
    began_s = time.monotonic()
    model = make_model(args.model, args.export, args.draft_vocab_size)
    hidden_size = model.config.transformer_layer_config.hidden_size
    samples = Arm(arm, opened(args.export, "train"), opened(args.wrong, "train"), model.verifier_norm)
    train = loader(samples, hidden_size, seed)
    heldout = loader(opened(args.export, "eval"), hidden_size, 0)
    call = {"ttt_steps": 1, "loss_config": resolve_loss_config("kl_div", "eager")}
    losses = Losses()
    logger = logging.getLogger("speculators.metrics")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [losses]
    config = TrainerConfig(
        lr=args.lr,
        num_epochs=1,
        save_path=str(args.runs / "unused"),
        train_call_kwargs=call,
        val_call_kwargs=call,
        hidden_states_dtype=torch.float32,
        scheduler_warmup_steps=max(args.steps // 20, 1),
        max_steps=args.steps,
    )
    trainer = Trainer(model, config, train, heldout)
    epoch = 0
    while trainer.global_step < args.steps:
        trainer.train_epoch(epoch)
        epoch += 1
    metrics = trainer.val_epoch(epoch) or {}
    if arm == ARMS[0] and seed == 0:
        model.save_pretrained(args.runs / "drafter")
    tenth = max(args.steps // 10, 1)
    return {
        "states": arm,
        "seed": seed,
        "steps": args.steps,
        "first_loss": sum(losses.values[:tenth]) / tenth,
        "final_loss": sum(losses.values[-tenth:]) / tenth,
        "heldout_loss": metrics["loss_epoch"],
        "heldout_accuracy": metrics["full_acc_0_epoch"],
        "losses": losses.values,
        "seconds": time.monotonic() - began_s,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="Hugging Face directory of the target.")
    parser.add_argument("export", type=Path)
    parser.add_argument("wrong", type=Path)
    parser.add_argument("--runs", type=Path, required=True, help="Folder for what is done.")
    parser.add_argument("--results", type=Path, required=True, help="JSON file to write.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=list(ARMS))
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--draft-vocab-size", type=int, default=2048)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    loguru.disable("speculators")  # a line for every file that it opens
    disable_progress_bar()
    on_the_cpu()
    args.runs.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in args.seeds:
        for arm in args.arms:
            path = args.runs / f"{arm}-{seed}-{args.steps}.json"
            if not path.exists():
                result = run(args, arm, seed)
                partial = path.with_suffix(".tmp")
                partial.write_text(json.dumps(result))
                os.replace(partial, path)
                print(
                    f"{arm:<12} seed {seed}: loss {result['first_loss']:.2f} -> {result['final_loss']:.2f}, "
                    f"held-out accuracy {result['heldout_accuracy']:.3f}, {result['seconds']:.0f} s",
                    flush=True,
                )
            results.append(json.loads(path.read_text()))
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
