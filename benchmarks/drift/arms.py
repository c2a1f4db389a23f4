"""The algorithms that are compared: changes to the learner's default settings.

Learning rates are those of each system's own rule where it has one of its own (SGD), and the same
otherwise, so that arms differ in what they are named for.
"""

from collections.abc import Mapping, Sequence

STATIC = "static"

ARMS: Mapping[str, Sequence[str]] = {
    # The defaults.
    "default": (),
    # Published systems, as far as they fit into this loop.
    "osd": (  # soft labels at the positions that verification rejected; no replay to speak of
        "objective.kind=osd",
        "batch.real_share=1.0",
        "replay.half_life=8.0",
    ),
    "gradient-descent": (  # hard labels, plain descent
        "objective.alpha=1.0",
        "optimiser.rule=sgd",
        "optimiser.learning_rate=0.1",
    ),
    "optimistic-sgd": (
        "objective.alpha=1.0",
        "optimiser.rule=sgd",
        "optimiser.hint=last",
        "optimiser.learning_rate=0.1",
    ),
    "adaflash": (  # random anchors on responses, its own order of clipping
        "objective.clip_order=mean",
        "objective.clip=0.01",
        "batch.real_share=0.0",
    ),
    # Ours, one change at a time.
    "survival": ("objective.kind=survival",),
    "negatives": ("objective.negatives=0.3",),
    "survival-optimistic": ("objective.kind=survival", "optimiser.hint=last"),
    "survival-base": ("objective.kind=survival", "ensemble.rates=[1.0]"),
    "survival-optimistic-base": (
        "objective.kind=survival",
        "optimiser.hint=last",
        "ensemble.rates=[1.0]",
    ),
    "survival-ensemble": ("objective.kind=survival", "ensemble.rates=[0.3, 1.0, 3.0]"),
    "survival-memory": (
        "objective.kind=survival",
        "ensemble.rates=[1.0]",
        "ensemble.play=leader",
        "ensemble.memories=2",
    ),
    "survival-negatives": ("objective.kind=survival", "objective.negatives=0.3"),
    "optimistic": ("optimiser.hint=last",),
    "ensemble": ("ensemble.rates=[0.3, 1.0, 3.0]",),
    "ensemble-leader": ("ensemble.rates=[0.3, 1.0, 3.0]", "ensemble.play=leader"),
    "memory": ("ensemble.rates=[1.0]", "ensemble.play=leader", "ensemble.memories=2"),
    "full": ("mode=full",),
    "last-layer": ("scope.weights=last-layers",),
    "low-rank": ("scope.weights=low-rank",),
    "real-blocks": ("batch.real_share=1.0",),
    "random-anchors": ("batch.real_share=0.0",),
    "full-logits": ("intake.top_k=0",),
    "drop": ("batch.conditional_drop=0.7",),
    "fast": ("optimiser.learning_rate=1e-3",),
}
