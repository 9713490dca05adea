"""RUN.yaml as a frozen tree. Read once at the edge; everything below gets values, never this tree.

Each field says what it is, with its unit and bounds; unknown keys are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from storage.keep import Keep

_MIB = 1 << 20


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(_Section):
    """The model whose states are collected."""

    path: str = Field(min_length=1)
    """Local folder with config.json and weights, or a Hugging Face hub id."""
    revision: str | None = None
    """Hub revision (branch, tag or commit); only for a hub id."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. It runs on every node as you: see docs/security.md."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type the model computes in, and of the stored states."""


class CaptureConfig(_Section):
    """Which states are kept. Boundary b is the residual stream after b decoder layers."""

    boundaries: Literal["eagle3"] | tuple[Annotated[int, Field(ge=0)], ...] = "eagle3"
    """Boundaries 0..N, ascending or not; N means the same as `final: true`. `eagle3` is {2, N//2, N-3}."""
    final: bool = False
    """Boundary N, before the final norm: what speculators trains on."""
    final_normed: bool = True
    """After the final norm, what lm_head reads: what SpecForge and EAGLE train on."""
    keep: str = "all"
    """Of which tokens the states are stored: `all`, `supervised` (loss mask 1), or `last:N`, the last N of each sample.
    docs/training.md says what needs all of them."""

    dtype: Literal["model", "bfloat16", "float8"] = "model"
    """Type of the stored states: as the model computes them, or 8-bit floats with a scale for each token and state, of
    half the bytes and an error of about 3 %. `bfloat16` is only for a model that computes in it."""

    @field_validator("keep")
    @classmethod
    def _known(cls, keep: str) -> str:
        return str(Keep.parse(keep))

    @model_validator(mode="after")
    def _something(self) -> CaptureConfig:
        if not (self.boundaries or self.final or self.final_normed):
            raise ValueError("nothing to capture: give boundaries, final or final_normed")
        if self.boundaries != "eagle3" and len(set(self.boundaries)) != len(self.boundaries):
            raise ValueError(f"boundaries {list(self.boundaries)} name one boundary twice")
        return self


class Markers(_Section):
    """Loss mask by marker strings in the rendered text."""

    start: str = Field(min_length=1)
    """Text that an assistant turn starts with; not supervised itself."""
    end: str = Field(min_length=1)
    """Text that ends an assistant turn; supervised, since the drafter has to propose it."""


class MarkersPolicy(_Section):
    """`loss_mask: {markers: {start: ..., end: ...}}`."""

    markers: Markers
    """The two strings."""


class PromptsConfig(_Section):
    """The input rows."""

    url: str = Field(min_length=1)
    """JSONL or Parquet file, any fsspec URL; a relative path starts where you typed the command."""
    format: Literal["auto", "jsonl", "parquet"] = "auto"
    """`auto` goes by the file's name."""
    max_tokens: int = Field(default=16_384, ge=1, le=1 << 20)
    """Longest row in tokens. A longer one is skipped or stops the run; it is never cut."""
    over_long: Literal["skip", "fail"] = "skip"
    """What happens to a row over max_tokens."""
    loss_mask: Literal["assistant", "last_turn", "split_turns", "all"] | MarkersPolicy = "assistant"
    """Which tokens are supervised: every assistant turn, the last one, one sample a turn, all tokens, or
    what stands between two markers."""
    chat_template: str | None = None
    """Jinja file that replaces the model's own chat template."""
    limit: int | None = Field(default=None, ge=1)
    """Take only the first so many rows."""


class GenerateConfig(_Section):
    """Answers by the model itself: rows that end in a user's turn are answered before anything is captured."""

    max_new_tokens: int = Field(default=1024, ge=1, le=1 << 20)
    """Longest answer in tokens. Prompt and answer together stay within prompts.max_tokens."""
    temperature: float = Field(default=0.0, ge=0, le=10)
    """Of the sampling; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Samples from the smallest set of tokens with this probability."""
    top_k: int = Field(default=-1, ge=-1)
    """Samples from so many of the most likely tokens; -1 is all."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """What every answer's own seed follows from. docs/answers.md says what a seed reproduces, and what it doesn't."""
    n: int = Field(default=1, ge=1, le=1024)
    """Answers to each row; each becomes a sample, `<id>/answer-1` and so on."""
    stop: tuple[str | int, ...] = ()
    """Texts of one token each, or token ids, that end an answer beside the model's own end of turn."""
    truncated: Literal["keep", "drop"] = "keep"
    """What becomes of an answer that came to no end: it is kept as far as it goes, or its row is skipped."""
    unanswered: Literal["fail", "skip"] = "fail"
    """A row that no engine could answer stops the run before the capture, or is skipped with its reason."""
    plain: Literal["keep", "complete"] = "keep"
    """Rows of `text` or `input_ids`, which have no turns: kept as they are, or completed by the model."""
    concurrent_rows: int = Field(default=256, ge=1, le=65_536)
    """Rows that an engine is given at once; SGLang decodes as many of them together as its KV pool holds."""

    @model_validator(mode="after")
    def _samples(self) -> GenerateConfig:
        if self.top_k == 0:
            raise ValueError("top_k is 0, which leaves no token to sample from; -1 takes all")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n is {self.n} and temperature 0: greedy answers to one row are all the same; give a temperature"
            )
        return self


class EngineConfig(_Section):
    """The engines that run the model."""

    kind: Literal["sglang", "synthetic"] = "sglang"
    """`sglang`, or `synthetic`: made-up states at any speed, to rehearse a run."""
    gpus: int | Literal["auto"] = "auto"
    """GPUs of one engine; 0 runs it on the CPU. `auto` is 1 where the cluster has GPUs, else 0. The tensor
    parallel size is gpus / data_parallel. Several engines share a node where its GPUs suffice."""
    data_parallel: int = Field(default=1, ge=1, le=64)
    """Data-parallel replicas inside one engine; divides gpus."""
    nodes: int = Field(default=1, ge=1, le=64)
    """Nodes of one engine. More than one is refused until it is tested: see docs/adr/0008."""
    count: int | Literal["auto"] = "auto"
    """Engines in the cluster; `auto` fills every node's GPUs, and is one a node on CPUs."""
    wait_for_nodes_s: float = Field(default=0, ge=0)
    """How long a run without any engine waits for a node that takes one, in seconds; the cluster's autoscaler
    is asked for `count` of them. 0 starts only if all of `count` fit, and ends when no engine is left."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further SGLang server arguments, by their Python names. Those that capture depends on are refused."""
    start_timeout_s: float = Field(default=3600, gt=0)
    """Longest time from an engine's start to the end of its proof, in seconds."""
    stall_timeout_s: float = Field(default=600, gt=0)
    """An engine with work and without progress for so long is replaced, in seconds."""

    @model_validator(mode="after")
    def _divides(self) -> EngineConfig:
        for name in ("gpus", "count"):
            value = getattr(self, name)
            low = 0 if name == "gpus" else 1
            if value != "auto" and not low <= value <= 1024:
                raise ValueError(f"{name} is {value}; it is auto or {low}..1024")
        if self.nodes > 1:
            raise ValueError(
                f"nodes is {self.nodes}; one engine over several nodes isn't tested yet. Take a node with more GPUs, "
                "or fewer bytes a weight (docs/adr/0008-engines-over-several-nodes.md has the plan)"
            )
        gpus = 1 if self.gpus == "auto" else self.gpus
        if self.data_parallel > 1 and (gpus == 0 or gpus % self.data_parallel):
            raise ValueError(
                f"gpus is {self.gpus} and data_parallel {self.data_parallel}; each replica needs GPUs of its own, so "
                "give a multiple of data_parallel (on the CPU run several engines: engine.count)"
            )
        return self


class WritersConfig(_Section):
    """The actors that write shards."""

    per_node: int = Field(default=1, ge=1, le=16)
    """Writers on each node that has an engine."""
    place: Literal["node", "head"] = "node"
    """`node` writes beside each engine; `head` writes all on the driver's node, for an output that only
    that machine sees."""
    shard_bytes: int = Field(default=1024 * _MIB, ge=1 * _MIB, le=64 * 1024 * _MIB)
    """A shard is sealed when its states reach this many bytes."""
    shard_age_s: float = Field(default=300, gt=0)
    """A shard is sealed when it has been open so long, in seconds: bounds what a crash can lose."""
    idle_s: float = Field(default=30, gt=0)
    """A shard is sealed when nothing was written for so long, in seconds."""
    codec: Literal["none", "lz4-bitshuffle", "zstd"] = "none"
    """How states are compressed: about a fifth smaller, and several times the CPU time. Fixed when the dump is
    made; a run with another codec than its dump's is refused."""


class LimitsConfig(_Section):
    """Budgets of the run."""

    batch_tokens: int = Field(default=16_384, ge=1)
    """Tokens handed to an engine in one batch; a longer sample goes alone."""
    batch_samples: int = Field(default=64, ge=1, le=4096)
    """Samples in one batch."""
    inflight_bytes: int | Literal["auto"] = "auto"
    """Bytes of states in flight per node. `auto` is 0.4 of the node's object store."""
    ring_bytes: int = Field(default=0, ge=0)
    """Shared memory between an engine's first rank and its actor, in bytes; 0 is room for four forwards."""
    sample_retries: int = Field(default=2, ge=0, le=100)
    """Retries of a sample that fails by its own fault."""
    losses_per_hour: int = Field(default=20, ge=1)
    """Engines, writers and batches lost within an hour that are borne; one more stops the run. Losses to
    pre-emption aren't counted."""
    reload_s: float = Field(default=21_600, gt=0)
    """Longest time that engines may spend loading again after losses, all of them together, in seconds."""
    breaker_failures: int = Field(default=50, ge=1)
    """Sample failures in a row, without one success, at which the run stops."""
    object_store_bytes: int | None = Field(default=None, ge=80 * _MIB)
    """Size of the object store of a cluster that this command starts itself; Ray's default otherwise."""
    storage_timeout_s: float = Field(default=900, gt=0)
    """Longest time that an output which fails or is full is waited for, in seconds; then the run stops."""
    drain_timeout_s: float = Field(default=120, gt=0)
    """Longest wait for work in flight when the run is asked to stop, in seconds."""


class RunConfig(_Section):
    """One run: what RUN.yaml holds."""

    model: ModelConfig
    """The model whose states are collected."""
    capture: CaptureConfig = CaptureConfig()
    """Which states are kept."""
    prompts: PromptsConfig
    """The input rows."""
    generate: GenerateConfig | None = None
    """Answers by the model itself; without it all rows are captured as they are."""
    output: str = Field(min_length=1)
    """Where the dump goes, an fsspec URL; a relative path starts where you typed the command."""
    engine: EngineConfig = EngineConfig()
    """The engines that run the model."""
    writers: WritersConfig = WritersConfig()
    """The actors that write shards."""
    limits: LimitsConfig = LimitsConfig()
    """Budgets of the run."""

    @model_validator(mode="after")
    def _stored_as_computed(self) -> RunConfig:
        if self.capture.dtype == "bfloat16" != self.model.dtype:
            raise ValueError(
                f"capture.dtype is bfloat16 and model.dtype {self.model.dtype}; states are stored as the model "
                "computes them, or as float8: set capture.dtype to model or float8, or model.dtype to bfloat16"
            )
        return self
