"""Who has how much to do: batches in flight, the engines that prefill, the writers that write. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.messages import SampleFailure, SampleRef
from actors.pace import Pace


@dataclass(frozen=True)
class Limits:
    """Bounds of a run's batches, permits and failures.

    Attributes:
        batch_tokens: most tokens in a batch of more than one sample.
        batch_bytes: most bytes of states in a batch of more than one sample.
        batch_samples: most samples in a batch.
        batches_per_engine: most batches that one engine has at once.
        in_flight_bytes: most bytes in flight on one node.
        retries: further attempts after a sample's first own failure.
        failures_in_a_row: a run that has failed that often without one success between is stopped.
        fed_tokens: an engine with less to do always gets more, whatever its share of what is left.
    """

    batch_tokens: int
    batch_bytes: int
    batch_samples: int
    batches_per_engine: int
    in_flight_bytes: int
    retries: int = 2
    failures_in_a_row: int = 50
    fed_tokens: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < (0 if name == "retries" else 1):
                raise ValueError(f"{name} is {value}; it must be positive")

    @property
    def bytes_per_batch(self) -> int:
        """Most bytes of states in a batch of more than one sample."""
        return min(self.batch_bytes, self.in_flight_bytes)

    def tokens_per_batch(self, bytes_per_token: float) -> int:
        """Most tokens in a batch of more than one sample, by tokens and, for the mean token, by bytes."""
        return min(self.batch_tokens, int(self.bytes_per_batch / bytes_per_token))


@dataclass(frozen=True)
class Dispatch:
    """A batch and where it goes."""

    batch_id: str
    engine: str
    writer: str
    samples: tuple[SampleRef, ...]


@dataclass
class Writer:
    """What one writer has to take.

    Attributes:
        number: never used again in this run.
        size_bytes: dispatched to it and not yet there.
        draining: it gets no more work.
    """

    name: str
    node: str
    number: int
    size_bytes: int = 0
    draining: bool = False


@dataclass
class Flight:
    """A batch between dispatch and its writer's word.

    Attributes:
        nodes: where it holds a permit.
        samples: row -> attempt, of the samples that are still in it.
        tokens: of all samples that it had.
        size_bytes: its permit, on each of the nodes.
        alone: a suspect's batch, on an engine that has nothing else.
        on_engine: until the engine has answered or died.
        blame: it died, and whether a sample may have killed it; None if it lives or has answered.
        failures: row -> why the engine or the writer gave no states for it.
        holds_permit: until the writer has the bytes.
    """

    batch_id: str
    engine: str
    writer: Writer
    nodes: tuple[str, ...]
    samples: dict[int, int]
    tokens: int
    size_bytes: int
    alone: bool
    on_engine: bool = True
    blame: bool | None = None
    failures: dict[int, SampleFailure] = field(default_factory=dict)
    holds_permit: bool = True


@dataclass
class Engine:
    """What one engine has to do.

    Attributes:
        batches: ids of the batches that it has not answered.
        tokens: outstanding, of those batches.
        done_samples: samples that it captured well or badly.
        draining: it gets no more work.
        alone: it holds a suspect and gets nothing beside it.
        pace: how fast it answers.
    """

    name: str
    node: str
    batches: dict[str, None] = field(default_factory=dict)
    tokens: int = 0
    done_samples: int = 0
    draining: bool = False
    alone: bool = False
    pace: Pace = field(default_factory=Pace)


class Engines:
    """The engines of a run, by name.

    Attributes:
        last_answer_s: when each engine that ever answered did so last, lost ones included.
    """

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self.last_answer_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._engines)

    def __getitem__(self, name: str) -> Engine:
        try:
            return self._engines[name]
        except KeyError:
            raise ValueError(f"there is no engine {name}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._engines

    def all(self) -> tuple[Engine, ...]:
        """Every engine, draining ones included."""
        return tuple(self._engines.values())

    @property
    def active(self) -> int:
        """Engines that get work."""
        return sum(not engine.draining for engine in self._engines.values())

    def speeds(self) -> dict[str, float]:
        """Tokens a second of each engine that gets work; the mean of the others for one that isn't measured yet.

        Empty while none is measured: then all count as equal.
        """
        active = {e.name: e.pace.tokens_per_s for e in self._engines.values() if not e.draining}
        known = [speed for speed in active.values() if speed is not None]
        if not known:
            return {}
        mean = sum(known) / len(known)
        return {name: mean if speed is None else speed for name, speed in active.items()}

    def free(self, max_batches: int) -> list[Engine]:
        """Engines that may get a batch and have fewer than ``max_batches``."""
        engines = self._engines.values()
        return [e for e in engines if len(e.batches) < max_batches and not e.draining and not e.alone]

    def add(self, name: str, node: str) -> None:
        """Adds an engine under a name that isn't in use."""
        if name in self._engines:
            raise ValueError(f"engine {name} was added before")
        self._engines[name] = Engine(name, node)

    def remove(self, name: str) -> Engine:
        """Takes the engine out, and returns what it had."""
        engine = self[name]
        del self._engines[name]
        return engine

    def load(self, flight: Flight, now_s: float) -> None:
        """The engine has the batch."""
        engine = self._engines[flight.engine]
        if not engine.batches:
            engine.pace.begin(now_s)
        engine.batches[flight.batch_id] = None
        engine.tokens += flight.tokens
        engine.alone = flight.alone

    def answered(self, flight: Flight, now_s: float) -> None:
        """The engine has done the batch."""
        self._engines[flight.engine].pace.answer(flight.tokens, now_s)
        self.last_answer_s[flight.engine] = now_s
        self.unload(flight)

    def unload(self, flight: Flight) -> None:
        """The engine, if it is still there, has it no more."""
        if not flight.on_engine:
            return
        flight.on_engine = False
        engine = self._engines.get(flight.engine)
        if engine is not None and flight.batch_id in engine.batches:
            del engine.batches[flight.batch_id]
            engine.tokens -= flight.tokens
            engine.done_samples += len(flight.samples)
            engine.alone = False


class Writers:
    """The writers of a run, by name."""

    def __init__(self) -> None:
        self._writers: dict[str, Writer] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._writers)

    def __contains__(self, writer: Writer) -> bool:
        # by identity: another writer may go by the name of one that was lost
        return self._writers.get(writer.name) is writer

    def all(self) -> tuple[Writer, ...]:
        """Every writer."""
        return tuple(self._writers.values())

    def add(self, name: str, node: str) -> None:
        """Adds a writer under a name that isn't in use."""
        if name in self._writers:
            raise ValueError(f"writer {name} was added before")
        self._writers[name] = Writer(name, node, self._added)
        self._added += 1

    def remove(self, name: str) -> Writer:
        """Takes the writer out."""
        writer = self[name]
        del self._writers[name]
        return writer

    def __getitem__(self, name: str) -> Writer:
        try:
            return self._writers[name]
        except KeyError:
            raise ValueError(f"there is no writer {name}") from None

    def nearest(self, node: str) -> Writer | None:
        """The writer on ``node`` with the fewest bytes to come, else the one with the fewest anywhere."""
        free = [w for w in self._writers.values() if not w.draining]
        here = [w for w in free if w.node == node]
        return min(here or free, key=lambda w: w.size_bytes, default=None)

    def load(self, flight: Flight) -> None:
        """The batch's bytes will come to its writer."""
        flight.writer.size_bytes += flight.size_bytes

    def unload(self, flight: Flight) -> None:
        """They have come, or never will."""
        flight.holds_permit = False
        flight.writer.size_bytes -= flight.size_bytes
