"""Traffic that the bundled drafter has not seen: chat in other languages, combined from parts.

    python benchmarks/online/domains.py french > french.jsonl

Every question pairs an opening with a subject, so that no two prompts are the same; the order is
fixed by a seed. Maths traffic (GSM8K), which the drafter knows well, comes from a prompt file.
"""

import argparse
import itertools
import json
import random
from typing import NamedTuple


class Language(NamedTuple):
    """Parts of questions in one language."""

    openings: tuple[str, ...]
    subjects: tuple[str, ...]


LANGUAGES = {
    "french": Language(
        openings=(
            "Explique-moi simplement {}.",
            "Écris un court texte sur {}.",
            "Quels sont les avantages et les inconvénients de {} ?",
            "Raconte l'histoire de {} en quelques phrases.",
            "Donne-moi cinq conseils à propos de {}.",
            "Pourquoi parle-t-on autant de {} aujourd'hui ?",
            "Écris une lettre à un ami qui s'intéresse à {}.",
            "Comment présenter {} à des enfants de dix ans ?",
            "Fais un résumé des points importants concernant {}.",
            "Écris un dialogue entre deux personnes qui parlent de {}.",
            "Quelles questions faut-il se poser avant de s'intéresser à {} ?",
            "Compare {} d'hier et d'aujourd'hui.",
        ),
        subjects=(
            "la cuisine italienne", "la révolution française", "le jardinage en ville",
            "la musique classique", "le changement climatique", "les voyages en train",
            "la photographie", "la santé des enfants", "le travail à distance",
            "la lecture le soir", "les énergies renouvelables", "la vie des abeilles",
            "le cinéma muet", "la course à pied", "la gestion d'un budget",
            "les châteaux de la Loire", "la peinture impressionniste", "les marchés de Provence",
            "l'apprentissage des langues", "la construction des ponts", "la vie dans les océans",
            "les jeux de société", "la mode des années soixante", "l'élevage des moutons",
            "la conduite en hiver", "les contes de fées", "la pêche en rivière",
            "l'architecture gothique", "la fabrication du fromage", "la vie des étudiants",
            "l'exploration de l'espace", "le tri des déchets", "la randonnée en montagne",
            "les fêtes de Noël", "la politesse au téléphone", "les animaux domestiques",
            "le commerce du café", "la banque en ligne", "la démocratie locale",
            "les inventions du siècle dernier",
        ),
    ),
    "spanish": Language(
        openings=(
            "Explícame de forma sencilla {}.",
            "Escribe un texto corto sobre {}.",
            "¿Cuáles son las ventajas y las desventajas de {}?",
            "Cuenta la historia de {} en pocas frases.",
            "Dame cinco consejos acerca de {}.",
            "¿Por qué se habla tanto de {} hoy en día?",
            "Escribe una carta a un amigo interesado en {}.",
            "¿Cómo se puede presentar {} a niños de diez años?",
            "Haz un resumen de los puntos importantes sobre {}.",
            "Escribe un diálogo entre dos personas que hablan de {}.",
            "¿Qué preguntas hay que hacerse antes de interesarse por {}?",
            "Compara {} de ayer y de hoy.",
        ),
        subjects=(
            "la cocina mexicana", "la historia de Roma", "la agricultura en el desierto",
            "la música flamenca", "el cambio climático", "los viajes en tren",
            "la fotografía", "la salud de los niños", "el trabajo a distancia",
            "la lectura por la noche", "las energías renovables", "la vida de las abejas",
            "el cine mudo", "las carreras de fondo", "la economía de una familia",
            "los castillos medievales", "la pintura de Velázquez", "los mercados de barrio",
            "el aprendizaje de idiomas", "la construcción de puentes", "la vida en los océanos",
            "los juegos de mesa", "la moda de los años sesenta", "la cría de caballos",
            "la conducción en invierno", "los cuentos populares", "la pesca en el río",
            "la arquitectura gótica", "la elaboración del queso", "la vida de los estudiantes",
            "la exploración del espacio", "el reciclaje de residuos", "las excursiones de montaña",
            "las fiestas de Navidad", "la cortesía por teléfono", "los animales domésticos",
            "el comercio del café", "la banca en línea", "la democracia local",
            "los inventos del siglo pasado",
        ),
    ),
}  # fmt: skip


def domain_prompts(language: str) -> list[str]:
    """All prompts of a language, in an order that mixes openings and subjects.

    Raises:
        KeyError: if the language is not one of `LANGUAGES`.
    """
    parts = LANGUAGES[language]
    prompts = [
        opening.format(subject)
        for opening, subject in itertools.product(parts.openings, parts.subjects)
    ]
    random.Random(0).shuffle(prompts)
    return prompts


def main() -> None:
    """Print the prompts of one language as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("language", choices=sorted(LANGUAGES))
    for prompt in domain_prompts(parser.parse_args().language):
        print(json.dumps({"prompt": prompt}, ensure_ascii=False))


if __name__ == "__main__":
    main()
