"""How every picture of the project looks: colours, sizes and matplotlib's settings."""

from __future__ import annotations

DPI = 150
INK, FAINT, ALARM = "#24292f", "#d8dce1", "#b3261e"
# parts of a rank's model states, and what lies elsewhere
PART_COLOURS = {"params": "#4477aa", "grads": "#ee9b3d", "optimizer": "#66a182"}
ELSEWHERE = {"offloaded_host": ("on host", "#c3cad3"), "offloaded_disk": ("on disk", "#e3d9c6")}

STYLE = {
    "font.size": 10.5,
    "axes.edgecolor": "#8b929a",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "text.parse_math": False,  # names of models and folders may hold dollar signs
}
