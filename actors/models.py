"""Where a model's files are on this node, and which they are elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from storage.errors import ModelError

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt")


@dataclass(frozen=True)
class ModelFiles:
    """A model as a machine sees it that doesn't run it.

    Attributes:
        folder: absolute path of what describes the model and tokenises; a hub model's weights needn't be there.
        source: the hub id that it comes from, else that folder.
        revision: the hub's commit; None for a folder.
        weights: bytes of each weight file, by its name.
    """

    folder: str
    source: str
    revision: str | None
    weights: dict[str, int]


def find_model(path: str, revision: str | None = None) -> ModelFiles:
    """Finds a model without fetching its weights, which may be a terabyte that only the engines' nodes need.

    Args:
        path: a folder, or a hub id.
        revision: branch, tag or commit on the hub.

    Raises:
        ModelError: there is no such folder, or the hub doesn't give it.
    """
    folder = Path(local_model(path, revision, weights=False))
    if Path(path).expanduser().is_dir():
        return ModelFiles(str(folder), str(folder), None, _weights_in(folder))
    commit = folder.name  # the hub's cache keeps a model in snapshots/<commit>
    return ModelFiles(str(folder), path, commit, _weights_on_hub(path, commit) or _weights_in(folder))


def _weights_in(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir() if file.suffix in WEIGHT_SUFFIXES}


def _weights_on_hub(hub_id: str, commit: str) -> dict[str, int]:
    """What the hub lists; nothing when it can't be asked, as on a machine that works from its cache alone."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        siblings = HfApi().model_info(hub_id, revision=commit, files_metadata=True).siblings or []
    except (HfHubHTTPError, OSError):
        return {}
    at_top = [s for s in siblings if "/" not in s.rfilename]
    return {s.rfilename: s.size or 0 for s in at_top if s.rfilename.endswith(WEIGHT_SUFFIXES)}


def local_model(path: str, revision: str | None = None, weights: bool = True) -> str:
    """The local folder of a model, fetched from the Hugging Face hub when ``path`` is a hub id.

    Args:
        path: a folder, or a hub id such as ``moonshotai/Kimi-K2.5``.
        revision: branch, tag or commit on the hub.
        weights: whether they are fetched as well; without, what tokenises and describes the model is.

    Returns:
        Absolute path of a folder.

    Raises:
        ModelError: there is no such folder, or the hub doesn't give it.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    if path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise ModelError(
            f"model.path {path}: no such folder (looked at {folder.absolute()}); give a folder with config.json and "
            "weights, or a hub id like owner/name"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    left_out = None if weights else [f"*{suffix}" for suffix in WEIGHT_SUFFIXES]
    try:
        return str(snapshot_download(path, revision=revision, ignore_patterns=left_out))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"model.path {path}: there is no such folder here, and the Hugging Face hub doesn't give it: "
            f"{type(error).__name__}: {str(error).splitlines()[0]}. Check the name, HF_TOKEN and the network, or "
            "download it and give the folder"
        ) from error
