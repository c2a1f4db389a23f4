"""Entry point ``adaspec`` of group ``sglang.srt.plugins``: what AdaSpec adds to every process.

SGLang calls `install` in the launcher, the scheduler and the detokenizer (``load_plugins``), and
skips it when ``SGLANG_PLATFORM`` names a platform of another distribution.
"""

import sys
from types import TracebackType

from adaspec.errors import AdaSpecError


def install() -> None:
    """Register AdaSpec with SGLang; safe to call in every server process, once each.

    SGLang logs the exception of a plugin and serves on, so nothing is refused here: what must not
    be served, another SGLang version for one, is refused by the algorithm and by the platform.
    """
    _show_user_errors_plainly()
    _register_algorithm()
    _version_the_prefix_cache()
    _install_cpu_hooks()


def _show_user_errors_plainly() -> None:
    """Print an `AdaSpecError` that ends the process as its one sentence, without a traceback."""
    show = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, AdaSpecError):
            print(f"{kind.__module__}.{kind.__qualname__}: {error}", file=sys.stderr)
        else:
            show(kind, error, traceback)

    sys.excepthook = excepthook


def _register_algorithm() -> None:
    """Make ``--speculative-algorithm ADASPEC`` known."""
    from sglang_patches.algorithm import register_algorithm

    register_algorithm()


def _version_the_prefix_cache() -> None:
    """Let requests look for prefixes of their drafter's context only."""
    from sglang_patches.online import namespace

    namespace.install()


def _install_cpu_hooks() -> None:
    """Replace kernels that need a GPU, only where the AdaSpec CPU platform was chosen."""
    from sglang.srt.platforms import current_platform

    if not current_platform.is_out_of_tree():
        return
    from sglang_patches.cpu.platform import AdaSpecCpuPlatform

    if isinstance(current_platform, AdaSpecCpuPlatform):
        from sglang_patches.cpu import hooks

        hooks.install()
