"""Which layer ids SGLang needs to feed a drafter given boundaries: its own setter, run backwards.

A drafter's config names layers, and SGLang's models turn these ids into the entries of ``layers_to_capture`` each
in its own way: most add one, deepseek_v2 only when the first id is 1, gpt_oss unless the largest is N. An entry is a
boundary (entry i is the input of layer i). So ids are tried out on the setter of the installed SGLang. It is taken
out of the model's source and run on a stand-in, because importing a model's module takes seconds, and some can't be
imported without a GPU.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from storage.export.draft_config import ServingIds

SETTER = "set_eagle3_layers_to_capture"
LIST = "layers_to_capture"


def serving_ids(architecture: str, boundaries: Sequence[int], num_layers: int) -> ServingIds:
    """Ids for a drafter's config.

    Args:
        architecture: the target's class in SGLang, such as ``LlamaForCausalLM``.
        boundaries: what the drafter was trained on, ascending.
        num_layers: N of the target.

    Returns:
        The ids; ``sglang`` is None, with the reason, where the installed SGLang has no way to these boundaries.
    """
    asked = tuple(boundaries)
    for ids in ([b - 1 for b in asked], list(asked)):
        try:
            got = captured_boundaries(architecture, ids, num_layers)
        except LookupError as error:
            return ServingIds(asked, None, asked, str(error))
        if got == asked:
            return ServingIds(asked, tuple(ids), asked)
    why_not = f"no ids make {architecture}.{SETTER} capture {list(asked)}"
    return ServingIds(asked, None, asked, why_not)


def captured_boundaries(architecture: str, ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The boundaries that SGLang captures when a drafter's config holds ``ids``.

    Raises:
        LookupError: SGLang isn't installed, or this architecture can't capture for EAGLE-3.
    """
    stand_in = _StandIn(architecture, num_layers)
    stand_in.call(SETTER, list(ids))
    for node in stand_in.walk():
        if LIST in node.__dict__:
            return tuple(sorted(node.__dict__[LIST]))
    raise LookupError(f"{architecture}.{SETTER} of this SGLang leaves no {LIST}")


class _Layer:
    """Takes whatever flags a setter puts on a layer."""


class _Yes:
    """Stands in for what a setter asks of its module, such as whether this is the last pipeline rank: yes."""

    def __getattr__(self, name: str) -> _Yes:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: object) -> _Yes:
        return self


class _StandIn:
    """Stands in for a loaded model: gives a setter what it reads, keeps what it sets.

    Attributes are made when they are read. The setter of the class that stands at an attribute is run if the class
    can be told from the source, as a multimodal wrapper's language model can; else its argument is kept as the list.
    """

    def __init__(self, architecture: str | None, num_layers: int) -> None:
        self.__dict__.update(_architecture=architecture, num_hidden_layers=num_layers, _num_layers=num_layers)
        self.__dict__.update(is_last_rank=True, layers=[_Layer() for _ in range(num_layers + 1)])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_to_capture"):
            return functools.partial(self.call, name)
        held = _class_held(self._architecture, name) if self._architecture else None
        child = self.__dict__[name] = _StandIn(held, self._num_layers)
        return child

    def call(self, name: str, ids: list[int]) -> None:
        """Runs the setter ``name``."""
        if self._architecture is None:
            self.__dict__[LIST] = list(ids)
            return
        method = _method(self._architecture, name)
        if method is None:
            raise LookupError(f"{self._architecture} of this SGLang has no {name}")
        module = ast.Module([ast.parse("from __future__ import annotations").body[0], method], [])
        asked = {node.id for node in ast.walk(method) if isinstance(node, ast.Name)}
        names: dict[str, Any] = {
            asked_name: _Yes() for asked_name in asked if not hasattr(builtins, asked_name)
        }
        exec(compile(ast.fix_missing_locations(module), f"<{self._architecture}>", "exec"), names)
        names[name](self, ids)

    def walk(self) -> Iterator[_StandIn]:
        """Itself and all that was made below it."""
        yield self
        for value in list(self.__dict__.values()):
            if isinstance(value, _StandIn):
                yield from value.walk()


@functools.cache
def _sources() -> dict[str, Path]:
    """Class -> file of every class in SGLang's models."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise LookupError("SGLang isn't installed here")
    folder = Path(next(iter(spec.submodule_search_locations))) / "srt/models"
    return {
        name: path
        for path in sorted(folder.glob("*.py"))
        for name in re.findall(r"^class (\w+)\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


@functools.cache
def _class(name: str) -> ast.ClassDef | None:
    path = _sources().get(name)
    if path is None:
        return None
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)


def _method(class_name: str, name: str) -> ast.FunctionDef | None:
    """A method of a class or of its bases, without its decorators."""
    found = _class(class_name)
    if found is None:
        return None
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            node.decorator_list = []
            return node
    bases = [base.id for base in found.bases if isinstance(base, ast.Name)]
    return next((method for base in bases if (method := _method(base, name))), None)


def _class_held(class_name: str, attribute: str) -> str | None:
    """The class with an EAGLE-3 setter that ``self.<attribute>`` is made of in the class's source."""
    found = _class(class_name)
    for node in ast.walk(found) if found else ():
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        targets = [t.attr for t in node.targets if isinstance(t, ast.Attribute)]
        made = node.value.func
        if attribute in targets and isinstance(made, ast.Name) and _method(made.id, SETTER):
            return made.id
    return None
