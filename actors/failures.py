"""What an exception of a remote call means for the run. By class, never by text.

| raised                                                 | fault       | answer                             |
| ------------------------------------------------------ | ----------- | ---------------------------------- |
| RayActorError; our InfrastructureError or StorageError | member      | the actor is given up and replaced |
| StorageFull                                            | full        | pause, then stop the run           |
| ObjectStoreFullError, OutOfDiskError                   | capacity    | pause, go on                       |
| any other error of Ray's own, the loss of an argument  | object lost | the batch is lost, without blame   |
| anything else: our SampleError, or a bug               | sample      | the samples' own budget            |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayActorError, RayError, RayTaskError

from actors.messages import FailureKind, SampleFailure
from storage.errors import (
    BadStates,
    EngineDead,
    InfrastructureError,
    RowMismatch,
    StorageError,
    StorageFull,
    TooLong,
)

_KINDS: tuple[tuple[type[Exception], FailureKind], ...] = (
    (TooLong, "too_long"),
    (RowMismatch, "row_mismatch"),
    (BadStates, "bad_states"),
)


class Fault(Enum):
    """Whose fault a failed call is, the one with the widest answer first."""

    MEMBER = auto()
    FULL = auto()
    CAPACITY = auto()
    OBJECT_LOST = auto()
    SAMPLE = auto()


@dataclass(frozen=True)
class Failure:
    """A failed call.

    Attributes:
        fault: whose fault it is.
        reason: one line for a person.
        preempted: the actor's node was taken away; such a loss isn't counted.
        kind: what to hold against a sample, where it is the sample's fault.
    """

    fault: Fault
    reason: str
    preempted: bool = False
    kind: FailureKind = "other"

    @property
    def sample_failure(self) -> SampleFailure:
        """As a sample's failure."""
        return SampleFailure(self.kind, self.reason)


def classify(error: RayError) -> Failure:
    """What ``error``, raised by a call to an engine or a writer, means.

    An error of Ray's own *inside* a `RayTaskError` is about the call's argument: the actor that was called
    lives. So is `EngineDead` in a writer's call.
    """
    if not isinstance(error, RayTaskError):
        reason = one_line(error)
        if isinstance(error, RayActorError):
            return Failure(Fault.MEMBER, reason, preempted=error.preempted)
        if isinstance(error, ObjectStoreFullError | OutOfDiskError):
            return Failure(Fault.CAPACITY, reason)
        return Failure(Fault.OBJECT_LOST, reason)
    cause = error.cause
    reason = f"{type(cause).__name__}: {one_line(cause)}"
    if isinstance(cause, StorageFull):
        return Failure(Fault.FULL, reason)
    if isinstance(cause, ObjectStoreFullError | OutOfDiskError):
        return Failure(Fault.CAPACITY, reason)
    if isinstance(cause, RayError):
        return Failure(Fault.OBJECT_LOST, reason)
    if isinstance(cause, InfrastructureError | StorageError):
        return Failure(Fault.MEMBER, reason)
    other: FailureKind = "other"
    kind = next((kind for cls, kind in _KINDS if isinstance(cause, cls)), other)
    return Failure(Fault.SAMPLE, reason, kind=kind)


def classify_put(error: RayError) -> Failure:
    """As `classify`, for a writer's ``put``, whose argument is an engine's segment.

    An engine's error arrives there as the put's own, so `EngineDead` is the loss of the segment.
    """
    failure = classify(error)
    if isinstance(error, RayTaskError) and isinstance(error.cause, EngineDead):
        return Failure(Fault.OBJECT_LOST, failure.reason)
    return failure


def one_line(error: BaseException) -> str:
    """The first line of an error's text that says something, else the name of its class."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
