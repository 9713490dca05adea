"""Reads RUN.yaml. ``--set a.b=value`` overrides are applied before the tree is checked, and so are checked too."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import yaml
from pydantic import BaseModel, ValidationError

from cluster.config import RunConfig
from storage.errors import ConfigError


def load_run(url: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads and checks a run file.

    Args:
        url: the YAML file, a path or any fsspec URL.
        overrides: ``key.sub=value`` with the value in YAML.

    Raises:
        ConfigError: one line for each thing that is wrong, with the key and the remedy.
    """
    try:
        with fsspec.open(url, "r", encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        raise ConfigError(f"run file {url}: no such file; examples/ has some to start from") from None
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"run file {url}: can't be read: {error}") from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"run file {url}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"run file {url}: holds {type(tree).__name__}, not a mapping with model, prompts, output"
        )
    for override in overrides:
        _apply(tree, override)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"run file {url}: " + "; ".join(_explain(e) for e in error.errors())) from error


def _apply(tree: dict[str, Any], override: str) -> None:
    key, found, value = override.partition("=")
    if not found or not key:
        raise ConfigError(f"--set {override}: write it as key.sub=value, for example --set engine.gpus=0")
    *path, last = key.split(".")
    node = tree
    for name in path:
        child = node.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(
                f"--set {override}: {name} holds {child!r} in the run file and has no key below it"
            )
        node = child
    try:
        node[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"--set {override}: {value!r} isn't valid YAML: {' '.join(str(error).split())}"
        ) from error


def _explain(error: Any) -> str:
    """One of pydantic's errors as a line that names the key, the value and what is expected."""
    path = [str(p) for p in error["loc"] if not str(p).startswith(("tuple[", "literal["))]
    where = ".".join(path)
    if error["type"] == "extra_forbidden":
        return f"unknown key {where}{_near(path)}"
    if error["type"] == "missing":
        return f"{where} is missing"
    message = error["msg"].removeprefix("Value error, ")
    value = error.get("input")
    shown = "" if isinstance(value, dict | BaseModel) else f" (got {value!r})"
    return f"{where + ': ' if where else ''}{message}{shown}"


def _near(path: list[str]) -> str:
    section: Any = RunConfig
    for name in path[:-1]:
        field = section.model_fields.get(name)
        section = field.annotation if field else None
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return ""
    names = list(section.model_fields)
    near = difflib.get_close_matches(path[-1], names, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(names)}"


def local_path(url: str, start: Path) -> str:
    """``url`` as it is when it names a file system, else the absolute path from the folder ``start``."""
    if "://" in url or "::" in url:
        return url
    return str((start / Path(url).expanduser()).resolve())
