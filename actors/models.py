"""Where a model's files are on this node."""

from __future__ import annotations

from pathlib import Path

from storage.errors import ModelError

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt")


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
