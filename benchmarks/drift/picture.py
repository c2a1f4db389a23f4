"""The course of each arm: committed tokens per target pass over the requests of a scenario."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.drift.arms import STATIC
from benchmarks.drift.runs import Run
from online.gate import tokens_per_pass


def draw(runs: Sequence[Run], chunk: int, path: Path) -> None:
    """One panel for each scenario, all seeds of an arm together; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(run.job.scenario for run in runs))
    figure, panels = plt.subplots(
        len(names), 1, figsize=(9, 3.2 * len(names)), squeeze=False, layout="constrained"
    )
    for panel, name in zip(panels[:, 0], names, strict=True):
        here = [run for run in runs if run.job.scenario == name]
        for arm in dict.fromkeys(run.job.arm for run in here):
            mine = [run.walks for run in here if run.job.arm == arm]
            starts = range(0, len(mine[0]), chunk)
            course = [
                tokens_per_pass([w for walks in mine for w in walks[s : s + 2 * chunk]])
                for s in starts
            ]
            style = {"color": "black", "linestyle": "--"} if arm == STATIC else {}
            panel.plot([s + chunk for s in starts], course, label=arm, **style)
        phases = here[0].phases
        for place in range(1, len(phases)):
            if phases[place] != phases[place - 1]:
                panel.axvline(place, color="grey", linewidth=0.8)
        panel.set_title(name)
        panel.set_ylabel("committed tokens per pass")
        panel.set_ylim(bottom=1)
    panels[-1, 0].set_xlabel("requests")
    panels[0, 0].legend(ncols=3, fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)
