"""Plots of a run, as PNG and SVG. Run in the environment that has matplotlib:

python -m benchmarks.plots RESULTS.json DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from .peers import PEERS
from .summary import LIMITS, Figure, Results

OURS, OURS_LIGHT, THEIRS, THEIRS_LIGHT = "#0b6e4f", "#8fc7b1", "#44546a", "#b8c2d0"
ROW_INCHES, WIDTH_INCHES, HEAD_INCHES, DOTS_PER_INCH = 0.42, 9.0, 1.2, 130
MIB = 2**20


class Plot(NamedTuple):
    """Horizontal bars: for every row one or two figures."""

    name: str
    title: str
    labels: tuple[str, ...]  # of the figures of a row
    rows: tuple[tuple[str, tuple[Figure | None, ...]], ...]
    logarithmic: bool = False
    limit: Figure | None = None  # drawn as a line
    scale: float = 1.0


def plots(report: dict[str, Any]) -> list[Plot]:
    """What is worth a picture, for each number of ranks; a plot of which nothing was measured is not there."""
    results = Results(report["records"])
    found = [plot for ranks in results.ranks() for plot in _plots(results, ranks)]
    kept = [plot._replace(rows=tuple(row for row in plot.rows if any(row[1]))) for plot in found]
    return [plot for plot in kept if plot.rows]


def _plots(results: Results, ranks: int) -> list[Plot]:
    of = f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"
    peers = [name for name, spec in PEERS.items() if spec.saves and name in results.peers(ranks)]

    def rows(*metrics: str) -> tuple[tuple[str, tuple[Figure | None, ...]], ...]:
        return tuple((PEERS[name].title, tuple(results.figure(ranks, name, m) for m in metrics)) for name in peers)

    memcpy, write = (results.figure(ranks, LIMITS, limit) for limit in ("memcpy", "write"))
    shares = tuple((PEERS[name].title, (results.ratio(ranks, (LIMITS, "write"), (name, "warm.durable")),)) for name in peers)
    loads = results.loads(ranks)

    def loading(prefix: str) -> tuple[tuple[str, tuple[Figure | None, ...]], ...]:
        return tuple(
            (way, tuple(results.figure(ranks, name, f"{prefix}.{way}.{kind}") for kind in ("warm", "cold")))
            for name, way in loads
        )

    both = ("warm", "first")
    return [
        Plot(f"save-{ranks}", f"save() returns after, s ({of})", both, rows("warm.save", "first.save"), True, memcpy),
        Plot(
            f"staged-{ranks}",
            f"The state may change after, s ({of})",
            both,
            rows("warm.staged", "first.staged"),
            True,
            memcpy,
        ),
        Plot(
            f"lost-{ranks}",
            f"Training time lost by a save, s ({of})",
            ("until durable",),
            rows("trained.lost"),
            False,
            memcpy,
        ),
        Plot(f"durable-{ranks}", f"Durable after, s ({of})", both, rows("warm.durable", "first.durable"), False, write),
        Plot(f"throughput-{ranks}", f"Durable throughput ÷ the disk's limit ({of})", ("warm",), shares),
        Plot(f"memory-{ranks}", f"Extra memory at most, MiB ({of})", ("PSS",), rows("memory"), scale=1 / MIB),
        Plot(f"load-{ranks}", f"Loading, s ({of})", ("warm", "cold"), loading("load")),
        Plot(f"reshard-{ranks}", f"Loading on {3 - ranks} what {of} saved, s", ("warm", "cold"), loading("reshard")),
    ]


def draw(plot: Plot, directory: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = plot.name  # the same figures give the same file
    from matplotlib import pyplot

    height = HEAD_INCHES + ROW_INCHES * len(plot.rows) * max(len(plot.labels) * 0.7, 1.0)
    figure, axes = pyplot.subplots(figsize=(WIDTH_INCHES, height), layout="constrained")
    thick = 0.8 / len(plot.labels)
    named: set[str] = set()
    for column, label in enumerate(plot.labels):
        for row, (title, figures) in enumerate(plot.rows):
            found = figures[column]
            if found is None:
                continue
            middle, low, high = (value * plot.scale for value in found[:3])
            color = _color(title, column)
            at = row - 0.4 + thick * (column + 0.5)
            axes.barh(at, middle, thick, color=color, label=None if label in named else label)
            named.add(label)
            axes.errorbar(middle, at, xerr=[[middle - low], [high - middle]], color="black", linewidth=0.8, capsize=2)
            axes.annotate(f" {middle:.3g}", (high, at), va="center", fontsize=8)
    axes.set_yticks(range(len(plot.rows)), [title for title, _ in plot.rows])
    axes.invert_yaxis()
    if plot.logarithmic:
        axes.set_xscale("log")
    if plot.limit is not None:
        axes.axvline(
            plot.limit.median * plot.scale, color="#c0392b", linewidth=1, linestyle="--", label="the machine's limit"
        )
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(plot.title, loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(directory / f"{plot.name}.png", dpi=DOTS_PER_INCH)
    figure.savefig(directory / f"{plot.name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def _color(title: str, column: int) -> str:
    return ((OURS, OURS_LIGHT) if title.startswith("Holdfast") else (THEIRS, THEIRS_LIGHT))[column]


if __name__ == "__main__":
    for each in plots(json.loads(Path(sys.argv[1]).read_text())):
        draw(each, Path(sys.argv[2]))
