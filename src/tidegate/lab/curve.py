"""The bandit's curve: as text for a terminal, and as a PNG."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidegate.core.errors import ConfigError
from tidegate.lab.bandit import Step

_BEST_ARM = "probability of the best arm"
_AVERAGE = "mean reward of the last ten steps"


def draw_terminal(steps: Sequence[Step], *, width: int = 76, height: int = 18) -> str:
    """The curve as ``height`` lines of at most ``width`` characters.

    Raises:
        ConfigError: plotext is not installed.
    """
    plotext = _package("plotext")
    numbers = [float(step.step) for step in steps]
    plotext.clear_figure()
    plotext.plotsize(width, height)
    plotext.theme("clear")
    plotext.plot(numbers, [step.best_arm_probability for step in steps], marker="braille", label=_BEST_ARM)
    plotext.plot(numbers, [step.reward_average for step in steps], marker=".", label=_AVERAGE)
    plotext.ylim(0, 1)
    ticks = sorted({1, *(len(steps) * quarter // 4 for quarter in range(1, 5))} - {0})
    plotext.xticks([float(tick) for tick in ticks], [str(tick) for tick in ticks])
    plotext.xlabel("step")
    return str(plotext.uncolorize(plotext.build()))


def draw_png(steps: Sequence[Step], file: Path) -> None:
    """Write the curve as a PNG.

    Raises:
        ConfigError: matplotlib is not installed, or the file can't be written.
    """
    _package("matplotlib").use("agg")
    pyplot = _package("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(8.0, 4.5), dpi=130, layout="constrained")
    numbers = [step.step for step in steps]
    axes.plot(numbers, [step.best_arm_probability for step in steps], color="#222222", lw=2.0, label=_BEST_ARM)
    axes.plot(numbers, [step.reward_average for step in steps], color="#4c78a8", lw=1.4, ls="--", label=_AVERAGE)
    axes.set(xlabel="step", ylim=(0, 1.02), xlim=(0, len(steps) + 1))
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    try:
        figure.savefig(file, format="png")
    except OSError as error:
        raise ConfigError(f"the curve cannot be written to {str(file)!r}: {error}; name a file that can be") from error
    finally:
        pyplot.close(figure)


def _package(name: str) -> Any:
    """A drawing package, imported when something is drawn: it is slow, and an extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"drawing needs the package {package!r}, which is not installed here; "
            "install it with: pip install 'tidegate[tasks]'"
        ) from error
