"""Predicted against measured, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot


def draw(points: Sequence[tuple[str, float, float]], title: str, path: Path) -> None:
    """Points (source, measured seconds, predicted seconds) on logarithmic axes, a colour for each source; PNG or SVG by the name."""
    figure, axes = pyplot.subplots(figsize=(8, 7))
    times = [time_s for _, *both in points for time_s in both]
    span = (0.8 * min(times), 1.25 * max(times))
    axes.plot(span, span, color="black", linewidth=0.8)
    axes.fill_between(span, [0.9 * x for x in span], [1.1 * x for x in span], color="black", alpha=0.08, label="within 10 %")
    colours = pyplot.get_cmap("tab20")
    sources = sorted({source for source, *_ in points}, key=lambda source: -sum(s == source for s, *_ in points))
    for i, source in enumerate(sources):
        own = [(measured, predicted) for s, measured, predicted in points if s == source]
        axes.scatter(*zip(*own, strict=True), s=18, color=colours(i % 20), marker="osD^v"[i // 20 % 5], label=f"{source} ({len(own)})")
    axes.set(xscale="log", yscale="log", xlim=span, ylim=span, xlabel="measured step [s]", ylabel="predicted step [s]", title=title)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
