"""The page's figures, by plotly. Colours of text and grid follow the page's scheme; see page.html.jinja."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from actors.capture.statistics import BINS_PER_OCTAVE
from cluster.page.statistics import Statistics

COLOURS = ("#4f8ef7", "#e2803b", "#3fae7a", "#c05fd0", "#d9a515", "#e0557b", "#2fb3c4", "#8a8f98")
"""Readable on white and on near black."""
_BINS = 40
_NORM_BINS = 80


def figure_html(figure: go.Figure, name: str) -> str:
    """A ``div`` and its script; plotly itself is on the page once.

    Args:
        figure: to draw.
        name: id of the div.
    """
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    figure.update_layout(
        margin={"l": 56, "r": 16, "t": 16, "b": 44},
        height=320,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        colorway=COLOURS,
        font={"family": "system-ui, sans-serif", "size": 12},
        legend=legend,
        hovermode="closest",
    )
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    config = {"displaylogo": False, "responsive": True, "displayModeBar": False}
    html: str = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config)
    return html


def throughput(timeline: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Tokens per second between the points of a run's timeline, and what is committed."""
    at = [p["s"] / 60 for p in timeline]
    tokens = np.array([p["captured_tokens"] for p in timeline], float)
    seconds = np.maximum(np.diff([p["s"] for p in timeline]), 1e-9)
    figure = go.Figure()
    figure.add_scatter(
        x=at[1:],
        y=np.diff(tokens) / seconds,
        name="tokens/s",
        mode="lines",
        line={"shape": "vh", "width": 2},
    )
    figure.add_scatter(
        x=at,
        y=[p["committed_tokens"] for p in timeline],
        name="committed tokens",
        yaxis="y2",
        mode="lines",
        line={"dash": "dot"},
    )
    figure.update_layout(
        xaxis_title="minutes",
        yaxis={"title": "tokens/s", "rangemode": "tozero"},
        yaxis2={"overlaying": "y", "side": "right", "rangemode": "tozero", "showgrid": False},
    )
    return figure


def where_time_went(timeline: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Seconds of engines and writers, summed over them, as one bar each."""
    last = timeline[-1]
    parts = (
        ("work", "engines", last["busy_s"]),
        ("starved", "engines", last["waiting_s"]),
        ("forwards wait", "ring", last["ring_wait_s"]),
        ("write", "writers", last["write_s"]),
        ("commit", "writers", last["seal_s"]),
    )
    figure = go.Figure()
    for name, group, seconds in parts:
        figure.add_bar(
            x=[seconds], y=[group], name=name, orientation="h", hovertemplate=f"{name}: %{{x:.1f}} s"
        )
    figure.update_layout(
        barmode="stack",
        xaxis_title="seconds, summed over engines or writers",
        yaxis={"categoryorder": "array", "categoryarray": ["writers", "ring", "engines"]},
        legend={"traceorder": "normal"},
    )
    return figure


def lengths(tokens: NDArray[np.int64]) -> go.Figure:
    """How long the committed samples are."""
    low, high = int(tokens.min()), int(tokens.max())
    width = -(-(high - low + 1) // _BINS)  # whole tokens, or bars would hold different numbers of lengths
    counts, edges = np.histogram(tokens, bins=np.arange(low, high + width + 1, width))
    figure = go.Figure()
    figure.add_bar(
        x=(edges[1:] + edges[:-1]) / 2,
        y=counts,
        width=np.diff(edges) * 0.94,
        customdata=np.stack([edges[:-1], edges[1:]], axis=-1),
        hovertemplate="%{customdata[0]} to below %{customdata[1]} tokens: %{y} samples<extra></extra>",
        showlegend=False,
    )
    figure.update_layout(xaxis_title="tokens", yaxis_title="samples")
    return figure


def norms(statistics: Statistics) -> go.Figure:
    """The distribution of tokens' norms at each state, logarithmic: massive activations are far to the right."""
    edges = _norm_edges(statistics)
    figure = go.Figure()
    for s in statistics.states:
        counts, _ = np.histogram(s.norms.values, bins=edges, weights=s.norms.tokens)
        figure.add_scatter(
            x=np.sqrt(edges[1:] * edges[:-1]),
            y=counts / max(1, counts.sum()),
            name=str(s.state),
            line={"shape": "spline", "smoothing": 0.6, "width": 2},
            hovertemplate=f"{s.state}: %{{y:.1%}} of the tokens near %{{x:.3g}}<extra></extra>",
        )
    figure.update_layout(
        xaxis={"title": "norm of a token's vector", "type": "log", "dtick": 1},
        yaxis={"title": "share of the tokens", "tickformat": ".0%", "rangemode": "tozero"},
    )
    return figure


def _norm_edges(statistics: Statistics) -> NDArray[np.float64]:
    """Edges of at most 80 bins, on those that norms are counted in: others would hold unequal numbers of them."""
    values = np.concatenate([s.norms.values[s.norms.values > 0] for s in statistics.states])
    places = np.log2(values if values.size else np.ones(1)) * BINS_PER_OCTAVE
    low, high = int(np.floor(places.min())), int(np.floor(places.max())) + 1
    step = -(-(high - low) // _NORM_BINS)
    return np.asarray(2.0 ** (np.arange(low - step, high + 2 * step, step) / BINS_PER_OCTAVE))


_ONE_TWO_FIVE = [digit * 10**power for power in range(7) for digit in (1, 2, 5)]


def outliers(statistics: Statistics) -> go.Figure:
    """Channels that stand out at each state."""
    figure = go.Figure()
    for s in statistics.states:
        figure.add_scatter(
            x=[c.index for c in s.outliers],
            y=[c.ratio for c in s.outliers],
            name=str(s.state),
            mode="markers",
            marker={"size": 9, "opacity": 0.85},
            hovertemplate=f"{s.state}, channel %{{x}}: %{{y:.0f}} times the median<extra></extra>",
        )
    channels = statistics.states[0].channels
    figure.update_layout(
        xaxis={"title": "channel", "range": [-channels * 0.02, channels * 1.02]},
        # Plotly's own labels between the decades are bare digits: 2 for 20 and for 200.
        yaxis={"title": "× the median channel", "type": "log", "tickvals": _ONE_TWO_FIVE},
    )
    return figure
