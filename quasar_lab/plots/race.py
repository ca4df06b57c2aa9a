"""The figure of a race: how many tokens each lane had written at each moment of its own clock."""

from collections.abc import Mapping, Sequence

import seaborn as sns
from matplotlib.figure import Figure

from quasar_lab.plots import MARKERS, _figure, style


def plot_race(progress: Mapping[str, Sequence[tuple[float, int]]]) -> Figure:
    """Tokens against seconds of decoding, one line a lane; steeper is faster, a rise is a step.

    progress: lane -> (seconds, tokens) after each step.
    """
    colors = sns.color_palette("colorblind")
    with style():
        figure, axes = _figure(8.0, 4.4)
        for i, (label, points) in enumerate(progress.items()):
            seconds, tokens = zip(*points, strict=True)
            axes.plot(
                seconds, tokens, color=colors[i], lw=2, drawstyle="steps-post", label=label,
                marker=MARKERS[i], markevery=[len(points) - 1], ms=9,
            )  # fmt: skip
        axes.set_xlim(0, None)
        axes.set_ylim(0, None)
        axes.set_xlabel("seconds of decoding, on the lane's own clock")
        axes.set_ylabel("tokens written")
        figure.legend(loc="outside lower center", ncols=2, fontsize=10)
    return figure
