"""Entry point ``adaspec`` of group ``sglang.srt.plugins``: what AdaSpec adds to every process.

SGLang calls `install` in the launcher, the scheduler and the detokenizer (``load_plugins``), and
skips it when ``SGLANG_PLATFORM`` names a platform of another distribution.
"""


def install() -> None:
    """Register AdaSpec with SGLang; safe to call in every server process, once each."""
    _install_cpu_hooks()
    _register_algorithm()


def _register_algorithm() -> None:
    """Make ``--speculative-algorithm ADASPEC`` known."""
    from sglang_patches.algorithm import register_algorithm

    register_algorithm()


def _install_cpu_hooks() -> None:
    """Replace kernels that need a GPU, only where the AdaSpec CPU platform was chosen."""
    from sglang.srt.platforms import current_platform

    if not current_platform.is_out_of_tree():
        return
    from sglang_patches.cpu.platform import AdaSpecCpuPlatform

    if isinstance(current_platform, AdaSpecCpuPlatform):
        from sglang_patches.cpu import hooks

        hooks.install()
