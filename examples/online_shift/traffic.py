"""Questions in English, then in French, to a running server; what each pass commits along the way.

    python examples/online_shift/traffic.py http://127.0.0.1:30000

The bundled drafter has hardly seen French. With a learner behind the server the last column rises.
"""

import argparse
import itertools
import random

from adaspec.load.client import Sampling
from adaspec.load.prompts import load_prompts
from adaspec.load.runner import LoadPlan, run_plans

OPENINGS = (
    "Explique-moi simplement {}.", "Écris un court texte sur {}.",
    "Raconte l'histoire de {} en quelques phrases.", "Donne-moi cinq conseils à propos de {}.",
    "Fais un résumé des points importants concernant {}.",
    "Pourquoi parle-t-on autant de {} aujourd'hui ?",
    "Comment présenter {} à des enfants de dix ans ?",
    "Écris un dialogue entre deux personnes qui parlent de {}.",
)  # fmt: skip
SUBJECTS = (
    "la cuisine italienne", "la révolution française", "la musique classique", "la photographie",
    "le changement climatique", "la lecture le soir", "la vie des abeilles", "le cinéma muet",
    "la course à pied", "les châteaux de la Loire", "l'apprentissage des langues",
    "la construction des ponts", "la vie dans les océans", "les jeux de société",
    "les contes de fées", "l'exploration de l'espace", "la randonnée en montagne",
    "le commerce du café", "les énergies renouvelables", "la fabrication du fromage",
    "la conduite en hiver", "le travail à distance", "les voyages en train", "la pêche en rivière",
    "l'architecture gothique",
)  # fmt: skip


def french() -> list[str]:
    """Every opening with every subject, mixed."""
    questions = [o.format(s) for o, s in itertools.product(OPENINGS, SUBJECTS)]
    random.Random(0).shuffle(questions)
    return questions


def main() -> None:
    """Send the traffic and print a line for every few requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:30000")
    parser.add_argument("--english", type=int, default=12, help="requests")
    parser.add_argument("--french", type=int, default=200, help="requests, at most 200")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--every", type=int, default=12, help="requests for each printed line")
    options = parser.parse_args()
    sampling = Sampling(max_tokens=options.max_tokens, temperature=0.0)
    print("language   requests  tokens/s  committed tokens per pass", flush=True)
    traffic = {
        "English": load_prompts(None)[: options.english],
        "French": french()[: options.french],
    }
    for language, questions in traffic.items():
        for start in range(0, len(questions), options.every):
            chunk = questions[start : start + options.every]
            plan = LoadPlan(
                concurrency=options.concurrency, requests=len(chunk), warmup=0, sampling=sampling
            )
            (run,) = run_plans(options.url, chunk, [plan])
            answered = [outcome for outcome in run.outcomes if outcome.error is None]
            tokens = sum(outcome.completion_tokens for outcome in answered)
            passes = sum(outcome.target_passes or 0 for outcome in answered)
            print(
                f"{language:<10} {start + len(answered):8d}  {tokens / run.wall_s:8.1f}  "
                f"{tokens / max(1, passes):.2f}",
                flush=True,
            )
            for error in {o.error for o in run.outcomes if o.error is not None}:
                print(f"failed: {error}", flush=True)


if __name__ == "__main__":
    main()
