"""Build the prompt files for the bundled drafter, on a CPU, ahead of the GPU run.

    python benchmarks/train_bundled/prompts.py --gsm8k gsm8k_train.jsonl --out DIR

writes `gsm8k.jsonl` and `code.jsonl` (prompts) and `openings.jsonl` (beginnings of user turns that
the target completes itself). Code prompts are signatures and docstrings of installed packages.
"""

import argparse
import ast
import json
import random
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

CODE_PREFIX = "Complete the code I provided.\n\n"

CHAT_OPENINGS = [
    "Write a",
    "Write an",
    "Write a short story about",
    "Write a blog post about",
    "Write an email",
    "Compose a",
    "Create a",
    "Design a",
    "Describe",
    "Explain",
    "Explain how",
    "Explain why",
    "How do I",
    "How can I",
    "How does",
    "How would you",
    "What is",
    "What are",
    "What is the difference between",
    "What would happen if",
    "Why do",
    "Why is",
    "Who was",
    "When did",
    "Where",
    "Which",
    "Give me",
    "Give an example of",
    "List",
    "Can you",
    "Could you help me",
    "Please",
    "I want to",
    "I need",
    "I'm",
    "I am a",
    "My",
    "Imagine you are",
    "Pretend",
    "You are",
    "Act as",
    "Suppose",
    "Summarize",
    "Translate",
    "Rewrite",
    "Edit the following",
    "Compare",
    "Analyze",
    "Evaluate",
    "Classify",
    "Identify",
    "Discuss",
    "Provide",
    "Outline",
    "Develop",
    "Generate",
    "Draft",
    "Suggest",
    "Tell me",
    "Help me",
    "Is it",
    "Are there",
    "Do you",
    "Should I",
    "In the",
    "The",
    "A",
    "Given the following",
    "Based on",
    "Consider",
    "Extract",
]

MATH_OPENINGS = [
    "Find the",
    "Compute",
    "Simplify",
    "If $",
    "Let $",
    "What is the value of",
    "Evaluate",
    "Solve",
    "How many",
    "The sum of",
    "Determine",
    "A triangle",
    "Suppose that",
    "Two",
    "The equation",
    "What is the largest",
]

PYTHON_OPENINGS = [
    "Complete the code I provided.\n\ndef ",
    "Complete the code I provided.\n\nfrom typing import List\n\n\ndef ",
    "Write a Python function",
    "Write a program",
    "Implement",
    "Write code to",
    "Fix the following code",
    "Write a SQL query",
    "Write a JavaScript function",
    "Write a class",
]


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K train questions")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--code", type=int, default=7000, help="code prompts")
    parser.add_argument("--questions", type=int, default=2, help="openings a GSM8K question")
    parser.add_argument("--chat", type=int, default=40, help="samples a chat opening")
    parser.add_argument("--blank", type=int, default=5000, help="samples of a whole user turn")
    options = parser.parse_args()
    random.seed(0)
    options.out.mkdir(parents=True, exist_ok=True)

    questions = [json.loads(line)["prompt"] for line in options.gsm8k.open(encoding="utf-8")]
    _write(options.out / "gsm8k.jsonl", [{"prompt": question} for question in questions])

    code = list(_code_prompts())
    random.shuffle(code)
    _write(options.out / "code.jsonl", [{"prompt": prompt} for prompt in code[: options.code]])

    openings = [
        {"kind": "gsm8k", "opening": _first_words(question)}
        for question in questions
        for _ in range(options.questions)
    ]
    openings += [{"kind": "chat", "opening": ""}] * options.blank
    for kind, texts, share in (
        ("chat", CHAT_OPENINGS, 1),
        ("math", MATH_OPENINGS, 3),
        ("code", PYTHON_OPENINGS, 5),
    ):
        openings += [
            {"kind": kind, "opening": text} for text in texts for _ in range(share * options.chat)
        ]
    random.shuffle(openings)
    _write(options.out / "openings.jsonl", openings)
    print(f"{len(questions)} questions, {len(code)} code prompts found, {len(openings)} openings")


def _first_words(question: str) -> str:
    words = question.split(" ")
    return " ".join(words[: random.randint(3, max(3, min(14, len(words) // 2)))])


def _code_prompts() -> Iterator[str]:
    """One prompt for each function with a signature and docstring short enough to stand alone."""
    seen = set()
    roots = [sysconfig.get_path("stdlib"), *site.getsitepackages()]
    for path in sorted({p for root in roots for p in Path(root).rglob("*.py")}):
        if "test" in path.parts or path.stat().st_size > 400_000:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, ValueError, OSError):
            continue
        lines = source.splitlines()
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            docstring = ast.get_docstring(node)
            if docstring is None or not 40 <= len(docstring) <= 700 or node.decorator_list:
                continue
            text = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]) + "\n"
            if len(text) > 1100 or not text.isascii() or (node.name, docstring) in seen:
                continue
            seen.add((node.name, docstring))
            yield CODE_PREFIX + text


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
