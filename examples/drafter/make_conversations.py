"""Makes conversations for the drafter out of the Python reference, which comes with every Python.

    python examples/drafter/make_conversations.py OUT.jsonl [--samples 360]

`pydoc_data.topics` holds about 80 chapters (PSF licence). A row asks for a part of one; its answer is some
paragraphs of that chapter. Paragraphs that several chapters share are taken once, so that none of the held-out text
is trained on. No network, no model, and the same rows wherever the same Python is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

ANSWER_CHARS = 700
"""Paragraphs are put together up to about this length, some 170 tokens."""


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of a chapter; the line breaks of prose are undone, those of code are kept."""
    for block in re.split(r"\n\s*\n", text):
        if len(block.strip()) > 20:
            yield block if block.startswith(" ") else " ".join(block.split())


def conversations() -> Iterator[dict[str, object]]:
    """Rows with ``id`` and ``messages``, chapter by chapter."""
    seen: set[str] = set()
    for topic in sorted(topics):
        answer, part = "", 0
        for paragraph in paragraphs(topics[topic]):
            if paragraph in seen:
                continue
            seen.add(paragraph)
            answer += paragraph + "\n\n"
            if len(answer) >= ANSWER_CHARS:
                part += 1
                yield _row(topic, part, answer)
                answer = ""


def _row(topic: str, part: int, answer: str) -> dict[str, object]:
    question = f"What does the Python reference say about {topic!r}? Give me part {part}."
    return {
        "id": f"{topic}-{part}",
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer.strip()},
        ],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="JSONL file to make.")
    parser.add_argument("--samples", type=int, default=360, help="Rows to take, evenly over all chapters.")
    args = parser.parse_args()
    rows = list(conversations())
    count = min(args.samples, len(rows))
    chosen = [rows[i * len(rows) // count] for i in range(count)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = args.out.with_suffix(".tmp")
    partial.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
    os.replace(partial, args.out)
    print(f"{count} conversations of {len(rows)} in {args.out}")


if __name__ == "__main__":
    main()
