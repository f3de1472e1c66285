"""The checkpoints of a pipeline over time, drawn to a file by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.sizes import counted
from exactlyonce.views.checkpoints import CheckpointView, Start

FORMATS = (".png", ".svg")


def require_format(path: Path) -> None:
    """Raise `ConfigError` unless the name of *path* says PNG or SVG."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot {path} is of no known format: let its name end with {' or '.join(FORMATS)}.")


def plot(
    path: Path, pipeline: str, manifests: Sequence[Manifest], lags: Mapping[int, int], starts: Sequence[Start]
) -> None:
    """Draw the durations of checkpoints and *lags*, in records by checkpoint, into *path*, with a line at each start.

    Raises `ConfigError` without matplotlib, and `OSError` where the file cannot be written.
    """
    with needing("plot", "matplotlib", "--plot"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    durations, lag = figure.subplots(2, sharex=True)
    figure.suptitle(pipeline)
    times = [_time(manifest.triggered_at_ms) for manifest in manifests]
    durations.plot(times, [CheckpointView(manifest, None).duration_ms / 1000 for manifest in manifests], marker=".")
    durations.set_ylabel("checkpoint duration in s")
    lag.plot(times, [lags.get(manifest.checkpoint, math.nan) for manifest in manifests], marker=".", color="C1")
    lag.set_ylabel("lag in records")
    lag.set_xlabel("time in UTC")
    runs = [start.at_ms for start in starts if not start.is_restart]
    restarts = [start.at_ms for start in starts if start.is_restart]
    for axes in (durations, lag):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        for at_ms, color, style in (*((at, "0.4", ":") for at in runs), *((at, "C3", "--") for at in restarts)):
            axes.axvline(_time(at_ms), color=color, linestyle=style)
    count = sum(start.restarts for start in starts if start.is_restart)
    durations.plot([], [], color="0.4", linestyle=":", label=f"{counted(len(runs), 'run')} began")
    durations.plot([], [], color="C3", linestyle="--", label=f"{counted(count, 'restart')} of workers")
    durations.legend(loc="upper left")
    lag.tick_params(axis="x", rotation=30)
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path)


def _time(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, timezone.utc)
