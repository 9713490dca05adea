"""A dump as a stream: sequential or shuffled, shared out over ranks and workers, resumable, read ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, get_worker_info

from storage.dataset import LazyDump, packed_item, sample_item
from storage.errors import ConfigError
from storage.layout import State
from storage.stream_plan import Unit, even, pack, sequential_order, share, shuffled_order

STATE_VERSION = 1
_DEALT_BY = ("samples", "seed", "shuffle", "window", "pack_tokens", "ends")
"""What a position means nothing without."""


@dataclass(frozen=True)
class Position:
    """How far a pass is.

    Attributes:
        epoch: the pass.
        start: units that all ranks together had when the process began to read.
        taken: units that this process, or this worker, yielded since.
        workers: workers of the rank; only with them does ``taken`` mean something.
    """

    epoch: int = 0
    start: int = 0
    taken: int = 0
    workers: int = 1


class DumpStream(LazyDump, IterableDataset[dict[str, Any]]):
    """The samples of a dump as a torch iterable dataset; every one exactly once an epoch, over all ranks.

    Ranks and DataLoader workers share the samples out among themselves without talking: the order of an epoch
    follows from the seed, the epoch and the dump's table. It reads ahead in threads, so no DataLoader workers
    are needed for speed; each worker would copy its tensors through shared memory. Wrap it with
    ``batch_size=None`` where a DataLoader is wanted. It is safe under workers that are spawned or forked (with
    object stores prefer spawn), since nothing is opened before the first item is asked for.

    An item is the dict that `DumpDataset` gives, or with ``pack_tokens`` one of several samples: ``sample_ids``
    (list of str), ``rows`` (list of int), ``cu_seqlens`` (int32 [n + 1]: sample i is [cu_seqlens[i] :
    cu_seqlens[i + 1]]), ``position_ids`` (int64 [T], from 0 in each sample), ``input_ids``, ``loss_mask`` and
    ``hidden_states`` of all samples after each other, and ``positions``: row i of the states is of
    ``input_ids[positions[i]]``.

    **Uneven ends.** With ``ends="keep"`` some ranks may have one item more than others, which a training step
    that all ranks take together has to cope with (torch's Join, for example). ``"drop"`` gives each rank the
    same number by leaving the epoch's last few, at most ``world_size - 1``, out; shuffled, they are others in
    each epoch.

    **Epochs.** Call `set_epoch` before each pass, as with torch's DistributedSampler; it reaches workers that
    persist as well.

    **Position.** `state_dict` and `load_state_dict` are what torchdata's StatefulDataLoader calls in its
    workers. Without workers, save ``stream.state_dict()`` between two items. Under a plain DataLoader with
    workers only the training loop knows how many items it had: save ``stream.state_after(items)``. Saved at
    the same step on every rank, a position may be taken up by another number of ranks and workers (not with
    StatefulDataLoader, whose states belong to its workers).

    Args:
        url: local path or fsspec URL of a dump.
        states: which states, in the order along K; None for all. Only their bytes are read.
        shuffle: shards in random order, samples shuffled in windows; False is the order of the stored bytes.
        seed: of the shuffle; the same on every rank.
        window: samples that are shuffled among each other. It costs no memory. Smaller windows read from fewer
            shards at a time.
        rank: of this process; None takes torch.distributed's where it is initialised, else 0.
        world_size: number of ranks; None likewise, else 1.
        ends: ``"keep"`` or ``"drop"``, see above.
        pack_tokens: yield packs of at most this many tokens; None yields samples.
        prefetch_bytes: bytes that may be read ahead; one item is always read, however large.
        threads: that read ahead.
        check: hold everything that is read against its hash in the manifests.
        page_cache: whether states are read through it, as in `storage.open_dump`; None decides by the dump's size.

    Raises:
        ConfigError: a value is out of its range.
    """

    def __init__(
        self,
        url: str,
        states: Sequence[State] | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        window: int = 4096,
        rank: int | None = None,
        world_size: int | None = None,
        ends: Literal["keep", "drop"] = "keep",
        pack_tokens: int | None = None,
        prefetch_bytes: int = 256 << 20,
        threads: int = 4,
        check: bool = True,
        page_cache: bool | None = None,
    ) -> None:
        super().__init__(url, states, check, page_cache)
        self.shuffle, self.seed, self.window = shuffle, seed, window
        self.rank, self.world_size = _ranks(rank, world_size)
        self.ends = ends
        self.pack_tokens = pack_tokens
        self.prefetch_bytes, self.threads = prefetch_bytes, threads
        for name, value in (("window", window), ("threads", threads), ("world_size", self.world_size)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        if ends not in ("keep", "drop"):
            raise ConfigError(f"ends is {ends!r}; it must be 'keep' or 'drop'")
        # Shared, so that workers that persist see the next epoch.
        self._epoch: torch.Tensor = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._pass = Position()
        self._loaded: Position | None = None

    @property
    def epoch(self) -> int:
        """Set by `set_epoch`."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass, which starts at its beginning unless a position of it was loaded."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """Items of this rank in a whole pass of the current epoch."""
        return len(share(self._units(), 0, self.rank, self.world_size))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        loaded, self._loaded = self._loaded, None  # once: the next pass is a whole one
        at = loaded if loaded and loaded.epoch == self.epoch else Position(self.epoch)
        if at.taken and at.workers != workers:
            raise ConfigError(
                f"the position was saved by one of {at.workers} workers and there are {workers} now; use as many"
            )
        self._pass = at = replace(at, workers=workers)
        mine = share(self._units(), at.start, self.rank, self.world_size, worker, workers)
        return self._run(mine[at.taken :])

    def _run(self, units: Sequence[Unit]) -> Iterator[dict[str, Any]]:
        for item in self._read_ahead(units):
            # Before the item is out: a state that is saved while it is used is past it.
            self._pass = replace(self._pass, taken=self._pass.taken + 1)
            yield item

    def state_dict(self) -> dict[str, Any]:
        """Where the pass stands: plain numbers and strings. See the class for what it holds under workers."""
        at = self._loaded or self._pass
        if at.epoch != self.epoch:
            at = Position(self.epoch)
        if get_worker_info() is None:
            at = replace(at, start=at.start + at.taken * self.world_size, taken=0)
        return self._state(at)

    def state_after(self, items: int) -> dict[str, Any]:
        """The position after each rank had ``items`` items of this pass: for DataLoaders that keep none."""
        start = self._loaded.start if self._loaded and self._loaded.epoch == self.epoch else 0
        return self._state(Position(self.epoch, start + items * self.world_size))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up a position: the next pass of its epoch starts there. Call it before the DataLoader starts.

        Raises:
            ConfigError: it is of a stream that deals its samples otherwise; what differs is listed.
        """
        own = self._state(Position())
        different = [
            f"{name}: {own[name]!r} here, {state.get(name)!r} in the state"
            for name in ("version", *_DEALT_BY)
            if state.get(name) != own[name]
        ]
        if state["taken"] and state["world_size"] != self.world_size:
            different.append(f"world_size: {self.world_size} here, {state['world_size']} in a worker's state")
        if different:
            raise ConfigError(f"a position in {self.url} can't be taken up: " + "; ".join(different))
        self._loaded = Position(state["epoch"], state["start"], state["taken"], state["workers"])
        self.set_epoch(state["epoch"])

    def _state(self, at: Position) -> dict[str, Any]:
        dealt_by = {name: len(self.dump) if name == "samples" else getattr(self, name) for name in _DEALT_BY}
        return {"version": STATE_VERSION, **dealt_by, "world_size": self.world_size, **asdict(at)}

    def _units(self) -> Sequence[Unit]:
        places = self.dump.places
        if self.shuffle:
            order = shuffled_order(places.shard, places.offset, self.seed, self.epoch, self.window)
        else:
            order = sequential_order(places.shard, places.offset)
        if self.pack_tokens is None:
            units: Sequence[Unit] = [(number,) for number in order.tolist()]
        else:
            units = pack(order, places.tokens, self.pack_tokens)
        return even(units, self.world_size) if self.ends == "drop" else units

    def _read_ahead(self, units: Sequence[Unit]) -> Iterator[dict[str, Any]]:
        """Items in order; what is read and not yet yielded stays within the budget."""
        ahead: deque[tuple[Future[dict[str, Any]], int]] = deque()
        ahead_bytes = 0
        coming = iter(units)
        unit = next(coming, None)
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="hsdump-read")
        try:
            while True:
                while unit is not None:
                    size = self._unit_bytes(unit)
                    if ahead and ahead_bytes + size > self.prefetch_bytes:
                        break
                    ahead.append((pool.submit(self._read, unit), size))
                    ahead_bytes += size
                    unit = next(coming, None)
                if not ahead:
                    return
                future, size = ahead.popleft()
                item = future.result()
                del future  # it holds the item, whose memory is wanted again
                ahead_bytes -= size
                yield item
                del item
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _unit_bytes(self, unit: Unit) -> int:
        layout = self.dump.layout.computed
        states = layout.num_states if self.states is None else len(self.states)
        kept = self.dump.places.kept
        return sum(layout.slots(int(kept[n])) for n in unit) * layout.chunk_bytes * states

    def _read(self, unit: Unit) -> dict[str, Any]:
        samples = [self.dump[number] for number in unit]
        if self.pack_tokens is None:
            return sample_item(samples[0], self.states)
        return packed_item(samples, self.states)


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    found = (0, 1)
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        found = (distributed.get_rank(), distributed.get_world_size())
    rank = found[0] if rank is None else rank
    world_size = found[1] if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank}, but world_size {world_size} has the ranks 0 to {world_size - 1}")
    return rank, world_size
