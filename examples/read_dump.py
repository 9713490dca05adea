"""Reads a dump the way a trainer does: python examples/read_dump.py DUMP."""

import sys

from torch.utils.data import DataLoader

from storage import DumpDataset, open_dump

if __name__ == "__main__":
    dump = open_dump(sys.argv[1])
    sample = dump[0]  # or dump["its-id"]
    print(f"{len(dump)} samples; {sample.sample_id}: {sample.tokens} tokens, boundaries {sample.boundaries}")
    boundary = sample.boundaries[1]
    print("one state ", boundary, tuple(sample.states(boundary).shape), sample.states(boundary).dtype)
    print("all states", tuple(sample.stack().shape), "supervised tokens", int(sample.loss_mask.sum()))

    dataset = DumpDataset(sys.argv[1], states=[*sample.boundaries, "final_normed"])
    loader = DataLoader(
        dataset, batch_size=None, shuffle=True, num_workers=2, multiprocessing_context="spawn"
    )
    tokens = sum(item["input_ids"].numel() for item in loader)
    print(f"one epoch with two workers: {tokens:,} tokens")
