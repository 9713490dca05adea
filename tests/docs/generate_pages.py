"""Writes the pages that follow from the code: docs/configuration.md and docs/errors.md.

python tests/docs/generate_pages.py
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from cluster.config import RunConfig  # noqa: E402
from storage import errors  # noqa: E402

PACKAGES = ("cluster", "actors", "storage")
_BOUNDS = {"ge": "at least {}", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}


# ---- configuration


def configuration_page() -> str:
    """Every key of a run file with its type, default and meaning."""
    lines = [
        "# Configuration",
        "",
        "<!-- made by `make docs` from cluster/config.py; don't edit -->",
        "",
        "A run file is YAML. Unknown keys are refused. `--set key.sub=value` overrides a key, and is checked like the",
        "file. Relative paths start where you type the command. `hsdump plan RUN.yaml` says what a run file comes to.",
        "",
    ]
    top = [(name, field) for name, field in RunConfig.model_fields.items() if _section(field) is None]
    lines += ["## Top level", "", *_table("", top), ""]
    for name, field in RunConfig.model_fields.items():
        section = _section(field)
        if section is not None:
            lines += [f"## {name}", "", inspect.getdoc(section) or "", ""]
            lines += [*_table(f"{name}.", list(_flat(section))), ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _flat(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        inner = _section(field)
        if inner is None:
            yield f"{prefix}{name}", field
        else:
            yield from _flat(inner, f"{prefix}{name}.")


def _table(prefix: str, fields: list[tuple[str, FieldInfo]]) -> list[str]:
    rows = ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in fields:
        values = "; ".join([_type(field.annotation), *_bounds(field)])
        default = (
            "required" if field.default is PydanticUndefined and field.is_required() else _default(field)
        )
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        rows.append(f"| `{prefix}{name}` | {values} | {default} | {meaning} |")
    return rows


def _type(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if a is type(None) else _type(a) for a in arguments)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is tuple:
        return f"list of {_type(arguments[0])}s"
    if origin is dict:
        return "mapping"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        inner = ", ".join(f"{n}: {_type(f.annotation)}" for n, f in kind.model_fields.items())
        return f"`{{{inner.replace('`', '')}}}`"
    names = {str: "text", int: "number", float: "number", bool: "true or false"}
    return names.get(kind, str(kind))


def _bounds(field: FieldInfo) -> list[str]:
    return [
        text.format(f"{getattr(bound, name):,}")
        for bound in field.metadata
        for name, text in _BOUNDS.items()
        if getattr(bound, name, None) is not None
    ]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


# ---- errors


@dataclass(frozen=True)
class Message:
    """One place that raises an error; what is filled in at run time stands in angle brackets."""

    kind: str
    where: str
    text: str


def raised_messages() -> list[Message]:
    """Every message that the three packages build an error of the tree with, in the order of their files."""
    kinds = set(tree_of(errors.HsdumpError))
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            where = str(path.relative_to(ROOT))
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                    texts = [_template(a) for a in node.args]
                    text = max(texts, key=len, default="")
                    if text.replace("<", "").replace(">", "").strip():
                        found.append(Message(node.func.id, where, text))
    return sorted(set(found), key=lambda m: (m.where, m.text))


def tree_of(kind: type[Exception]) -> dict[str, list[str]]:
    """Name of each class -> names of those that derive from it."""
    below = [k for k in kind.__subclasses__() if k.__module__ == errors.__name__]
    tree = {kind.__name__: [k.__name__ for k in below]}
    for k in below:
        tree |= tree_of(k)
    return tree


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(v) for v in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"<{_name(node.value).lstrip('_')}>"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return f"<{_name(node)}>"


def _name(node: ast.expr) -> str:
    """A word for what is filled in: the last name of the expression that isn't a method's."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call):
        inner = [*node.args, node.func.value] if isinstance(node.func, ast.Attribute) else list(node.args)
        return _name(inner[0]) if inner else "..."
    if isinstance(node, ast.Subscript | ast.Starred):
        return _name(node.value)
    if isinstance(node, ast.BinOp):
        return _name(node.left)
    return "..."


def errors_page() -> str:
    """The tree, and each message once."""
    drawing = inspect.getdoc(errors) or ""
    tree = drawing[drawing.index("    HsdumpError") :]
    lines = [
        "# Errors",
        "",
        "<!-- made by `make docs` from the code; don't edit -->",
        "",
        "The command prints an error as one line, `hsdump: error: ...`, and exits with 2 for something that you can",
        "mend and with 1 for anything else; `--debug` shows where it came from. From Python, catch the class: each is",
        "in `storage.errors`, and `HsdumpError` is the root. What is filled in at run time stands in `<...>`.",
        "",
        tree.rstrip(),
        "",
    ]
    messages = raised_messages()
    for name in tree_of(errors.HsdumpError):
        kind = getattr(errors, name)
        own = [m for m in messages if m.kind == name]
        about = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
        lines += [f"## {name}", "", about, ""]
        lines += [f"* {_code(text)}" for text in sorted({m.text for m in own})]
        lines += [""] if own else []
    return "\n".join(lines).rstrip() + "\n"


def _code(text: str) -> str:
    flat = " ".join(text.split())
    return f"`` {flat} ``" if "`" in flat else f"`{flat}`"


PAGES = {"docs/configuration.md": configuration_page, "docs/errors.md": errors_page}


def main() -> None:
    """Writes the pages."""
    for name, make in PAGES.items():
        (ROOT / name).write_text(make())
        print(f"written: {name}")


if __name__ == "__main__":
    main()
