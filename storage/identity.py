"""What makes two runs the same run: a resume with another identity would mix two datasets. Pure, no I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

_ABSENT = object()


@dataclass(frozen=True)
class Identity:
    """Everything that decides what a dump's numbers are; values are plain JSON.

    Attributes:
        model: ``path`` (a local folder), ``source`` (hub id, or that folder), ``revision`` (the hub's commit),
            digest, dtype, ...
        capture: ``boundaries``, ``final``, ``final_normed``, ``num_layers``, hidden size.
        prompts: digest of the prompt files, tokenizer and template, mask and length policies.
        engine: those engine arguments that change numbers.
    """

    model: Mapping[str, Any]
    capture: Mapping[str, Any]
    prompts: Mapping[str, Any]
    engine: Mapping[str, Any]

    def differences(self, other: Identity) -> list[str]:
        """Where ``other``, the identity in a dump, differs; empty when a resume may go on.

        Returns:
            One line a field, such as ``capture.boundaries: [2, 15, 27] here, [2, 15, 28] in the dump``.
        """
        here, there = _counted(self), _counted(other)
        return [
            f"{name}: {_show(here.get(name, _ABSENT))} here, {_show(there.get(name, _ABSENT))} in the dump"
            for name in sorted(here.keys() | there.keys())
            if here.get(name, _ABSENT) != there.get(name, _ABSENT)
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form: tuples have become lists, as they would on a way through a file.

        Raises:
            TypeError: a value isn't JSON.
        """
        data = {field.name: dict(getattr(self, field.name)) for field in fields(self)}
        plain: dict[str, Any] = json.loads(json.dumps(data))
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Identity:
        """Inverse of `to_json`.

        Raises:
            KeyError: a part is missing.
        """
        return cls(**{field.name: data[field.name] for field in fields(cls)})


def _counted(identity: Identity) -> dict[str, Any]:
    """Its fields by their names, without the folder of a model whose hub id and commit are there."""
    fields_by_name = _flatten(identity.to_json())
    if fields_by_name.get("model.source") != fields_by_name.get("model.path"):
        fields_by_name.pop("model.path", None)
    return fields_by_name


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):  # an empty one is the same as none
            flat.update(_flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def _show(value: Any) -> str:
    return "not set" if value is _ABSENT else json.dumps(value)
