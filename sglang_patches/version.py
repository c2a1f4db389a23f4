"""The one SGLang release that AdaSpec serves with."""

from adaspec.errors import AdaSpecError

SGLANG_VERSION = "0.5.23"
"""The release whose internals the worker and the CPU platform were built and tested on."""


def require_sglang_version() -> None:
    """Refuse any other SGLang; a local version suffix, as of a rebuilt wheel, is accepted.

    Raises:
        AdaSpecError: naming both versions.
    """
    # Not at the top: SGLang imports the platform, and with it this module, while it is imported.
    from sglang.version import __version__ as installed

    if installed.partition("+")[0] != SGLANG_VERSION:
        raise AdaSpecError(
            f"AdaSpec works with SGLang {SGLANG_VERSION} only, but {installed} is installed; "
            f"install sglang=={SGLANG_VERSION}."
        )
