"""Which states an export takes out of a dump, or why the dump can't serve. Pure, no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from storage.dump import DumpHeader
from storage.errors import ConfigError, OutputError
from storage.export.form import ExportFormat, Selection

_OPTION = {"final": "capture.final: true", "final_normed": "capture.final_normed: true"}
_MEANS = {"final": "boundary N, before the final norm", "final_normed": "the state after the final norm"}


def select(header: DumpHeader, form: ExportFormat, boundaries: Sequence[int] | None) -> Selection:
    """The states for a trainer.

    Args:
        header: the dump's.
        form: the trainer's format.
        boundaries: those that the user named; None takes the dump's own where their number fits, else EAGLE-3's.

    Raises:
        ConfigError: the number of boundaries isn't one that the trainer takes, or the choice is the user's.
        OutputError: the dump lacks a state or tokens, or holds a type that the format can't; the message names the
            run's option.
    """
    layout = header.layout
    if not layout.keep.everything:
        raise OutputError(
            f"{form.trainer} reads the states of every token, and the dump holds those of some (keep: {layout.keep}); "
            "collect with capture.keep: all"
        )
    held = tuple(s for s in layout.states if isinstance(s, int))
    fewest, most = form.boundaries
    if most == 0 and boundaries:
        raise ConfigError(f"--boundaries: {form.trainer} reads the last state only; leave the option out")
    if most == 0:
        chosen: tuple[int, ...] = ()
    elif boundaries is None:
        chosen = _default(header, form, held)
    else:
        chosen = tuple(sorted(boundaries))
    if not fewest <= len(chosen) <= most or len(set(chosen)) < len(chosen):
        raise ConfigError(
            f"--boundaries: {form.trainer} takes {_number(fewest, most)} boundaries, and these are "
            f"{', '.join(map(str, chosen)) or 'none'}"
        )
    missing = [b for b in chosen if b not in held]
    if missing:
        raise OutputError(
            f"boundary {', '.join(map(str, missing))} isn't in the dump, which holds "
            f"{', '.join(map(str, held)) or 'none'}; {form.trainer} needs it: collect with capture.boundaries: "
            f"[{', '.join(map(str, sorted({*held, *missing})))}]"
        )
    if form.final not in layout.states:
        raise OutputError(
            f"{form.trainer} trains on {_MEANS[form.final]}, which the dump lacks (it holds "
            f"{', '.join(map(str, layout.states))}) and which can't be computed from the others here; collect with "
            f"{_OPTION[form.final]}"
        )
    why_not = form.check_layout(layout)
    if why_not:
        raise OutputError(f"{why_not}; collect with model.dtype: bfloat16, or export to another trainer")
    return Selection(chosen, form.final)


def _default(header: DumpHeader, form: ExportFormat, held: tuple[int, ...]) -> tuple[int, ...]:
    """The dump's boundaries where they are three or the trainer takes any number, else EAGLE-3's among them."""
    fewest, most = form.boundaries
    if (fewest <= len(held) <= most) and (len(held) <= 3 or header.num_layers is None):
        return held
    n = header.num_layers
    eagle3 = () if n is None else (2, n // 2, n - 3)
    if eagle3 and set(eagle3) <= set(held):
        return eagle3
    if len(held) < fewest:
        needs = "capture.boundaries: eagle3" if fewest == 3 else "capture.boundaries"
        raise OutputError(
            f"{form.trainer} takes {_number(fewest, most)} boundaries and the dump holds "
            f"{', '.join(map(str, held)) or 'none'}; collect with {needs}"
        )
    raise ConfigError(
        f"the dump holds the boundaries {', '.join(map(str, held))}; choose those for {form.trainer} with "
        f"--boundaries, for example --boundaries {','.join(map(str, held[:3]))}"
    )


def _number(fewest: int, most: int) -> str:
    return f"exactly {fewest}" if fewest == most else f"{fewest} or more"
