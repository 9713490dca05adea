"""A run file resolved against what is there: the model's shape, the boundaries, the identity. No Ray yet."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from actors.capture.boundary import resolve_boundaries
from actors.capture.flags import check_flags, check_names, declared_fields
from actors.capture.model_info import ModelInfo, read_model_info
from actors.models import ModelFiles, find_model
from cluster.config import GenerateConfig, MarkersPolicy, PromptsConfig, RunConfig
from cluster.run_file import local_path
from storage.errors import ConfigError
from storage.identity import Identity
from storage.keep import Keep
from storage.layout import Layout, State, shard_rows_for
from storage.prompts import GenerateSpec, LossMask, PromptSpec


@dataclass(frozen=True)
class Run:
    """One invocation of the command.

    Attributes:
        run_id: new for every invocation; part of request ids and claims.
        files: where the model is.
        boundaries: below N, ascending.
        final: whether boundary N is kept.
        prompts: what prepares the input.
    """

    run_id: str
    config: RunConfig
    files: ModelFiles
    model: ModelInfo
    boundaries: tuple[int, ...]
    final: bool
    final_normed: bool
    prompts: PromptSpec

    @property
    def keep(self) -> Keep:
        """Of which tokens the states are stored."""
        return Keep.parse(self.config.capture.keep)

    @property
    def encoding(self) -> str:
        """How states are stored; one of `storage.layout.ENCODINGS`."""
        return "float8" if self.config.capture.dtype == "float8" else "none"

    def layout(self, longest_tokens: int) -> Layout:
        """Geometry of a dump whose longest sample has so many tokens."""
        states: list[State] = list(self.boundaries)
        states += ["final"] if self.final else []
        states += ["final_normed"] if self.final_normed else []
        return Layout(
            states=tuple(states),
            hidden_size=self.model.hidden_size,
            dtype=self.config.model.dtype,
            shard_rows=shard_rows_for(longest_tokens),
            codec=self.config.writers.codec,
            keep=self.keep,
            encoding=self.encoding,
        )

    def identity(self, prompts: Mapping[str, Any]) -> Identity:
        """What makes two runs the same run; ``prompts`` is the prepared input's own part of it."""
        return Identity(
            model={
                "path": self.files.folder,
                "source": self.files.source,
                "revision": self.files.revision,
                "architecture": self.model.architecture,
                "files": model_digest(self.files),
                "dtype": self.config.model.dtype,
            },
            capture={
                "boundaries": list(self.boundaries),
                "final": self.final,
                "final_normed": self.final_normed,
                "num_layers": self.model.num_layers,
                "hidden_size": self.model.hidden_size,
                "keep": self.config.capture.keep,
                "dtype": "float8" if self.encoding == "float8" else self.config.model.dtype,
            },
            prompts=prompts,
            engine={"kind": self.config.engine.kind, "args": self.config.engine.args},
        )


def resolve(config: RunConfig, start: Path) -> Run:
    """Checks everything that can be checked without the cluster.

    Args:
        config: the run file.
        start: folder that relative paths start from.

    Raises:
        UserError: the first thing that can't work, with the remedy.
    """
    check_flags(config.engine.args)
    real = config.engine.kind == "sglang"  # a synthetic engine's arguments are its faults
    known = declared_fields() if real and config.engine.args else ()
    if known:  # where SGLang isn't installed, the engine's own start says so
        check_names(config.engine.args, known)
    here = local_path(config.model.path, start)
    files = find_model(here if Path(here).is_dir() else config.model.path, config.model.revision)
    model = read_model_info(files.folder)
    boundaries, last = resolve_boundaries(config.capture.boundaries, model.num_layers)
    prompts = _prompt_spec(config.prompts, config, files.folder, model, start)
    return Run(
        run_id=uuid.uuid4().hex[:8],
        config=config,
        files=files,
        model=model,
        boundaries=boundaries,
        final=config.capture.final or last,
        final_normed=config.capture.final_normed,
        prompts=prompts,
    )


def model_digest(files: ModelFiles) -> str:
    """xxh3-64 of config.json and of the weight files' names and sizes: cheap, and sees another checkpoint."""
    digest = xxhash.xxh3_64((Path(files.folder) / "config.json").read_bytes())
    for name, size_bytes in sorted(files.weights.items()):
        digest.update(f"{name}:{size_bytes};".encode())
    return digest.hexdigest()


def _prompt_spec(
    prompts: PromptsConfig, config: RunConfig, model_path: str, model: ModelInfo, start: Path
) -> PromptSpec:
    template = None
    if prompts.chat_template is not None:
        path = Path(local_path(prompts.chat_template, start))
        try:
            template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"prompts.chat_template {path}: can't be read: {error}; give a Jinja file"
            ) from error
    policy = prompts.loss_mask
    if isinstance(policy, MarkersPolicy):
        mask = LossMask("markers", policy.markers.start, policy.markers.end)
    else:
        mask = LossMask(policy)
    return PromptSpec(
        url=local_path(prompts.url, start),
        tokenizer_path=model_path,
        max_tokens=prompts.max_tokens,
        format=prompts.format,
        over_long=prompts.over_long,
        loss_mask=mask,
        chat_template=template,
        trust_remote_code=config.model.trust_remote_code,
        limit=prompts.limit,
        vocab_size=model.vocab_size,
        generate=_generate_spec(config.generate),
    )


def _generate_spec(given: GenerateConfig | None) -> GenerateSpec | None:
    """What decides the answers; how the pass is led isn't among it."""
    if given is None:
        return None
    return GenerateSpec(**given.model_dump(exclude={"unanswered", "concurrent_rows"}))
