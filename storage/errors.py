"""Every error that hsdump raises on purpose, in one tree.

Policy is by class: what the coordinator retries, what the command line exits with and what a person has to
mend is decided with ``isinstance``, never by a message's text. Each message says what failed, where, with
which value, and what to do.

    HsdumpError
    ├── UserError                  exit code 2: something the user can mend before anything is spent
    │   ├── ConfigError            a run file, an override or a command line option      (ValueError)
    │   ├── PromptError            the prompt file, a chat template, a loss mask policy  (ValueError)
    │   ├── ModelError             the model's files or architecture                     (ValueError)
    │   ├── OutputError            the output location
    │   │   └── IdentityMismatch   the output holds another run's dump
    │   ├── CaptureRefused         flags or a model whose states would be silently wrong
    │   └── ResourceError          GPUs, memory, ports, shared memory that aren't there
    ├── SampleError                one sample's own fault: counted against its own budget
    │   ├── TooLong                longer than the engine can take: skipped, never retried
    │   ├── RowMismatch            rows, positions or token ids differ from what was sent
    │   ├── BadStates              non-finite values or all-zero rows
    │   └── RowRejected            a prompt row that can't become a sample: skipped with its reason
    ├── InfrastructureError        a process or node failed: not the sample's fault
    │   ├── EngineDead             the engine's processes are gone or no longer answer
    │   └── LeaseLost              a writer's claim isn't its own any more
    ├── ProofFailed                the start-up proof says that captured states would be wrong
    ├── StorageError               reading or writing the dump failed                    (OSError)
    │   ├── AlreadyExists          a put-if-absent found the object there                (FileExistsError)
    │   ├── StorageFull            no space left at the output
    │   ├── StorageDenied          the storage refuses the credentials or their rights    (PermissionError)
    │   └── CorruptDump            the dump's bytes aren't what its manifest says
    └── IncompleteRun              exit code 1: the run ended and not every sample is accounted for as good
"""

from __future__ import annotations


class HsdumpError(Exception):
    """Root of everything that hsdump raises on purpose."""


class UserError(HsdumpError):
    """Something the user can mend; the command line prints it as one line and exits with 2."""


class ConfigError(UserError, ValueError):
    """A run file, an override or a command line option is wrong."""


class PromptError(UserError, ValueError):
    """The prompt file, its chat template or its loss mask policy is wrong."""


class ModelError(UserError, ValueError):
    """The model's files or its architecture can't be used."""


class OutputError(UserError):
    """The output location can't be used."""


class IdentityMismatch(OutputError):
    """The output holds the dump of another run; the message lists the fields that differ."""


class CaptureRefused(UserError):
    """A flag or a model under which captured states would be silently wrong."""


class ResourceError(UserError):
    """GPUs, memory, ports or shared memory that the run needs aren't there."""


class SampleError(HsdumpError):
    """One sample's own fault; it counts against that sample's budget."""


class TooLong(SampleError):
    """The sample is longer than the engine can take. It is skipped and never retried."""


class RowMismatch(SampleError):
    """Rows, positions or token ids that came back differ from what was sent."""


class BadStates(SampleError):
    """Non-finite values or all-zero rows among the captured states."""


class RowRejected(SampleError):
    """A row of the prompt file that can't become a sample; it is skipped and accounted for.

    Attributes:
        kind: short class of the reason, by which rejected rows are counted.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(kind, reason)
        self.kind = kind
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class InfrastructureError(HsdumpError):
    """A process or a node failed, which is no sample's fault."""


class EngineDead(InfrastructureError):
    """The engine's processes are gone or no longer answer."""


class LeaseLost(InfrastructureError):
    """A shard that this writer has open is no longer its own; it must not write to it any more."""


class ProofFailed(HsdumpError):
    """The start-up proof says that captured states would be wrong. Nothing was collected."""


class StorageError(HsdumpError, OSError):
    """Reading or writing the dump failed."""


class AlreadyExists(StorageError, FileExistsError):
    """A put-if-absent found the object already there."""


class StorageFull(StorageError):
    """No space is left at the output."""


class StorageDenied(StorageError, PermissionError):
    """The storage refuses the credentials or what they may do."""


class CorruptDump(StorageError):
    """The dump's bytes aren't what its manifest says."""


class IncompleteRun(HsdumpError):
    """The run ended and some samples failed or are still missing; the command line exits with 1."""
