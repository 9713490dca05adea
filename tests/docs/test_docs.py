"""The documents: generated pages are current, links lead somewhere, commands are ones that there are."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
import yaml
from generate_pages import PAGES, ROOT, raised_messages, tree_of
from made_dumps import make_dump
from tiny_tokenizer import tiny_tokenizer

from cluster.cli import app, run_cli
from storage import errors

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ---- generated pages


@pytest.mark.parametrize("name", list(PAGES))
def test_generated_pages_are_current(name: str) -> None:
    assert (ROOT / name).read_text() == PAGES[name](), f"{name} is out of date: make docs"


def test_the_tree_is_drawn_as_it_is() -> None:
    drawn: dict[str, list[str]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^    ([│├└─ ]*)(\w+)(?: {2,}.*|$)", line)
        if found and (found[2] == "HsdumpError" or "──" in found[1]):
            above[len(found[1]) // 4 :] = [found[2]]
            drawn[found[2]] = []
            if len(above) > 1:
                drawn[above[-2]].append(found[2])
    assert drawn == tree_of(errors.HsdumpError)


def test_each_kind_of_error_that_is_raised_is_on_the_page() -> None:
    page = (ROOT / "docs/errors.md").read_text()
    flat = " ".join(page.split())
    messages = raised_messages()
    assert len(messages) > 100
    assert [m for m in messages if " ".join(m.text.split()) not in flat] == []
    leaves = {name for name, below in tree_of(errors.HsdumpError).items() if not below}
    raised_by_name = {"TooLong", "BadStates"}  # made from what an engine reports, by the class's name
    assert leaves - {m.kind for m in messages} - raised_by_name == set()


# ---- links


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in _LINK.findall(document.read_text()):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (document.parent / path) if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def anchors(document: Path) -> set[str]:
    """GitHub's names of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop().resolve()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = [link.partition("#")[0] for link in _LINK.findall(page.read_text()) if "://" not in link]
        targets = [page.parent / link for link in links if link]
        ahead += [t for t in targets if t.is_file()]
        ahead += [p for t in targets if t.is_dir() for p in t.glob("*.md")]
    assert {name_of(d) for d in DOCUMENTS} - {name_of(r) for r in reached} == set()


# ---- commands


def commands() -> Iterator[tuple[str, str]]:
    """(document, command) of every line of an indented or fenced block that runs hsdump or make."""
    for document in DOCUMENTS:
        fenced, last = False, ""
        for line in document.read_text().splitlines():
            fenced = fenced != line.startswith("```")
            if not (fenced or line.startswith("    ")):
                continue
            line = last + line.strip()
            last = line.removesuffix("\\") if line.endswith("\\") else ""
            for part in re.split(r" && | -- ", re.split(r"\s{2,}#", line)[0]):
                found = re.match(r"^(?:.*/)?(?:\w+=\S+ )*(hsdump|make|python -m cluster) (.+)$", part)
                if found and not last and "[" not in part:  # what is in brackets is a usage, not a command
                    yield name_of(document), f"{found[1].replace('python -m cluster', 'hsdump')} {found[2]}"


COMMANDS = sorted(set(commands()))


@pytest.mark.parametrize(("document", "command"), COMMANDS, ids=[f"{d}: {c}" for d, c in COMMANDS])
def test_commands_are_ones_that_there_are(document: str, command: str) -> None:
    program, *words = shlex.split(command, comments=True)
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {w for w in words if "=" not in w} - targets == set()
        return
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    known = group.commands  # type: ignore[attr-defined]
    assert words[0] in known, f"there is no command {words[0]}"
    known[words[0]].make_context(words[0], [w for w in words[1:] if w != "--debug"], resilient_parsing=False)


def test_the_readmes_commands_for_a_dump_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of them but those that start engines, on a small dump and a small model."""
    model = tmp_path / "model"
    tiny_tokenizer("chatml").save_pretrained(str(model))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 64,
        "vocab_size": 999,
    }
    (model / "config.json").write_text(json.dumps(config))
    (tmp_path / "conversations.jsonl").write_text(json.dumps({"text": "Why is the sky blue?"}))
    block = re.search(r"```yaml\n(model:.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None, "the README shows a run file"
    run = yaml.safe_load(block[1]) | {"model": {"path": str(model)}, "engine": {"gpus": 0}, "output": "out"}
    run["prompts"]["loss_mask"] = "all"  # the made-up rows are plain text
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    make_dump(tmp_path / "dump", [9, 20, 30], skipped=[1])
    monkeypatch.chdir(tmp_path)
    ran = []
    for command in (c for d, c in COMMANDS if d == "README.md" and c.startswith("hsdump ")):
        words = [w.replace("/data/dumps/llama", "dump") for w in shlex.split(command, comments=True)[1:]]
        if (words[0] in ("plan", "inspect", "report", "repair") and "--probe" not in words) or (
            words[0] == "verify" and "--reference" not in words
        ):
            assert run_cli(words) == 0, f"{command}: {capsys.readouterr()}"
            ran.append(words[0])
    assert {"plan", "inspect", "report"} <= set(ran)
