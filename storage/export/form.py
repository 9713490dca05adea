"""What an export format is: which states its trainer means, and which files hold a sample. Pure, no I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from storage.layout import Layout, State

Final = Literal["final", "final_normed"]
Piece = bytes | npt.NDArray[np.uint8]

TRAIN, EVAL = "train", "eval"
"""Folders of an export, and the names of its splits."""


@dataclass(frozen=True)
class Selection:
    """The states that an export takes out of a dump.

    Attributes:
        boundaries: n auxiliary states, ascending.
        final: the target's last state: before or after the final norm.
    """

    boundaries: tuple[int, ...]
    final: Final

    @property
    def states(self) -> tuple[State, ...]:
        """Boundaries, then the final state."""
        return (*self.boundaries, self.final)


@dataclass(frozen=True)
class Part:
    """Samples that follow each other in a split; one task writes them.

    Attributes:
        split: `TRAIN` or `EVAL`.
        number: among the split's parts.
        parts: of the split.
        first: place in the split of the part's first sample.
        numbers: the samples, as the dump numbers them.
        tokens: T of each.
    """

    split: str
    number: int
    parts: int
    first: int
    numbers: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class ExportSample:
    """One sample with the selected states; nothing is shifted or padded.

    Attributes:
        sample_id: as in the prompt file.
        input_ids: int64 [T].
        loss_mask: int64 [T], 1 where the token counts in a loss.
        aux: [T, n, H] of the model's element type: the boundaries, low to high.
        final: [T, H]: the final state.
    """

    sample_id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    final: torch.Tensor

    @property
    def flat_aux(self) -> torch.Tensor:
        """[T, n * H]: the boundaries of a token after each other."""
        return self.aux.reshape(self.aux.shape[0], -1)


class Source(Protocol):
    """Where a format gets the samples of a part from."""

    def sample(self, number: int) -> ExportSample:
        """Sample ``number`` of the dump with its states."""

    def columns(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Its token ids and loss mask alone, int64 [T] each."""


@dataclass(frozen=True)
class File:
    """A file to be written.

    Attributes:
        key: path below the destination.
        pieces: makes the contents, to be put after each other; it isn't called where the file is there already.
    """

    key: str
    pieces: Callable[[], Iterable[Piece]]


@dataclass(frozen=True)
class About:
    """What index files say of the dump that the samples come from.

    Attributes:
        model: name or path of the target, as the run file had it.
        layout: the dump's.
        selection: what is exported.
    """

    model: str
    layout: Layout
    selection: Selection


class ExportFormat(ABC):
    """One trainer's files.

    Attributes:
        name: after ``--to``.
        trainer: its name for people.
        final: which final state it means.
        boundaries: fewest and most auxiliary states that it takes.
        file_a_sample: whether each sample is a file of its own.
        part_bytes: bytes of states at which a part ends; a part has at least one sample.
    """

    name: ClassVar[str]
    trainer: ClassVar[str]
    final: ClassVar[Final]
    boundaries: ClassVar[tuple[int, int]]
    file_a_sample: ClassVar[bool] = True
    part_bytes: ClassVar[int] = 256 << 20

    @abstractmethod
    def layer_ids(self, boundaries: Sequence[int]) -> list[int]:
        """The boundaries in the trainer's own numbering."""

    @abstractmethod
    def files(self, part: Part, source: Source) -> Iterator[File]:
        """The files of one part."""

    def index_files(self, split: str, parts: Sequence[Part], about: About) -> Iterator[File]:
        """Files that are written last, over all parts of a split. They may change when an export is repeated."""
        return iter(())

    def vocabulary_files(
        self, counts: npt.NDArray[np.int64], d2t: torch.Tensor | None, t2d: torch.Tensor | None
    ) -> Iterator[File]:
        """Token counts, and the maps where a draft vocabulary was asked for, in the trainer's own places.

        Args:
            counts: int64 [V], how often each token is supervised in the training split.
            d2t: int64 [draft vocabulary], target id minus draft id.
            t2d: bool [V].
        """
        return iter(())

    def check_layout(self, layout: Layout) -> str | None:
        """Why the format can't hold states of this layout; None where it can."""
        return None

    @abstractmethod
    def usage(self, data: str, selection: Selection) -> str:
        """What to give the trainer, with ``data`` for the folder of the training split."""


def output_ids(boundaries: Sequence[int]) -> list[int]:
    """The numbering in which id k is the output of 0-based layer k; -1 is the embedding output."""
    return [b - 1 for b in boundaries]


def torch_bytes(payload: Mapping[Any, Any]) -> bytes:
    """``torch.save`` of a dict, in memory. Each tensor is saved with its own bytes only, not those it is a view of."""
    import io

    own = {
        name: value.contiguous().clone() if isinstance(value, torch.Tensor) else value
        for name, value in payload.items()
    }
    file = io.BytesIO()
    torch.save(own, file)
    return file.getvalue()


class TorchFileFormat(ExportFormat):
    """A format with one ``torch.save`` file a sample."""

    @abstractmethod
    def key(self, split: str, place: int) -> str:
        """Path of the sample at ``place`` in its split. Never made from its id, which is other people's text."""

    @abstractmethod
    def payload(self, sample: ExportSample) -> dict[str, Any]:
        """What the file holds."""

    def files(self, part: Part, source: Source) -> Iterator[File]:
        """See `ExportFormat.files`."""
        for i, number in enumerate(part.numbers):
            yield File(
                self.key(part.split, part.first + i),
                lambda n=number: self._pieces(source, n),  # type: ignore[misc]
            )

    def _pieces(self, source: Source, number: int) -> list[Piece]:
        return [torch_bytes(self.payload(source.sample(number)))]
