"""Every export format by the name that ``hsdump export --to`` takes."""

from __future__ import annotations

from collections.abc import Mapping

from storage.export.angelslim import AngelSlim
from storage.export.deepspec import DeepSpec
from storage.export.eagle import Eagle
from storage.export.form import ExportFormat
from storage.export.modelopt import ModelOpt
from storage.export.specforge import SpecForge
from storage.export.speculators import Speculators

FORMATS: Mapping[str, ExportFormat] = {
    form.name: form for form in (SpecForge(), Speculators(), ModelOpt(), Eagle(), AngelSlim(), DeepSpec())
}
