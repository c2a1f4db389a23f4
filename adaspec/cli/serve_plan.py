"""What `adaspec serve` is going to do: every choice made and checked before SGLang is started."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import adaspec
from adaspec.cli.serve_online import OnlinePlan, plan_online
from adaspec.config import CONFIG_ENVIRONMENT_VARIABLE, AdaSpecConfig, load_config
from adaspec.errors import AdaSpecError
from adaspec.load.launch import ServerSpec

BUNDLED_DRAFTER = Path(adaspec.__file__).parent / "bundled" / "smollm2-135m-instruct-b16"

# Options of SGLang that `adaspec serve` sets itself, and its own option for each.
_OWN_OPTIONS = {
    "--model-path": "--target",
    "--model": "--target",
    "--host": "--host",
    "--port": "--port",
    "--dtype": "--dtype",
    "--speculative-algorithm": "--plain to switch it off",
    "--speculative-draft-model-path": "--drafter",
}


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `adaspec serve`, as the user gave them.

    Attributes:
        target: model directory or hub name; ``None`` is the embedded SmolLM2-135M-Instruct.
        drafter: drafter directory; ``None`` is the bundled one, which fits the embedded target.
        online: learn from the traffic, with a learner beside the server.
        learn_config: the learner's configuration file.
        config: configuration file; ``None`` takes the one ``ADASPEC_CONFIG`` names, if any.
        extra: SGLang's own options, passed on unchanged.
    """

    target: str | None
    drafter: Path | None
    plain: bool
    online: bool
    learn_config: Path | None
    config: Path | None
    dtype: str | None
    host: str
    port: int
    extra: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ServePlan:
    """A server ready to be started, and the plain sentences that describe it.

    Attributes:
        learner: the one to start beside it; ``None`` for no learner.
    """

    spec: ServerSpec
    learner: OnlinePlan | None
    sentences: tuple[str, ...]


def plan_server(options: ServeOptions, progress: Callable[[str], None]) -> ServePlan:
    """Find or build the target, check drafter and configuration, and describe the result.

    Args:
        options: what the user asked for.
        progress: called with one line when a long step begins.

    Raises:
        AdaSpecError: for anything that could not be served.
    """
    _check_options(options)
    config_file, config = _configuration(options)
    target = _target(options, progress)
    drafter = None if options.plain else (options.drafter or BUNDLED_DRAFTER)
    sentences = [f"Target: {target}"]
    if drafter is None:
        sentences.append("Drafter: none; plain decoding, one token per pass of the target.")
    else:
        progress("Checking the drafter against the target")
        sentences.append(_drafter_sentence(drafter, target, config))
    learner = None
    if options.online and drafter is not None:
        learner = plan_online(config, drafter, target, options.learn_config, options.port)
        config_file = learner.config
        sentences += learner.sentences
    sentences.append(_device_sentence())
    spec = ServerSpec(
        target=target,
        host=options.host,
        port=options.port,
        drafter=None if drafter is None else str(drafter),
        dtype=options.dtype,
        config=config_file,
        extra=options.extra,
    )
    return ServePlan(spec=spec, learner=learner, sentences=tuple(sentences))


def _check_options(options: ServeOptions) -> None:
    if options.plain and (options.drafter or options.config):
        raise AdaSpecError(
            "--plain serves without speculation, so --drafter and --config have no effect; "
            "leave either side out."
        )
    if options.plain and options.online:
        raise AdaSpecError(
            "--plain serves without a drafter, so there is nothing to learn; leave out --online."
        )
    if options.learn_config is not None and not options.online:
        raise AdaSpecError("--learn-config is the learner's; add --online to start one.")
    for word in options.extra:
        if own := _OWN_OPTIONS.get(word.partition("=")[0]):
            raise AdaSpecError(f"{word} is set by adaspec serve itself; use its option {own}.")
    if options.extra and not options.extra[0].startswith("-"):
        raise AdaSpecError(
            f"unexpected argument {options.extra[0]!r}; options for SGLang go after --, "
            "as in: adaspec serve -- --max-running-requests 8."
        )
    if options.target is not None and options.drafter is None and not options.plain:
        raise AdaSpecError(
            f"the bundled drafter is SmolLM2's, not one for {options.target}; give yours with "
            "--drafter, or --plain to serve without one."
        )


def _configuration(options: ServeOptions) -> tuple[Path | None, AdaSpecConfig]:
    named = os.environ.get(CONFIG_ENVIRONMENT_VARIABLE)
    file = options.config or (Path(named) if named else None)
    if options.plain or file is None:
        return None, AdaSpecConfig()
    return file, load_config(file)


def _target(options: ServeOptions, progress: Callable[[str], None]) -> str:
    if options.target is None:
        from adaspec.target.smollm2 import ensure_smollm2

        return str(ensure_smollm2(progress=progress))
    if options.target.startswith(("/", ".", "~")) and not Path(options.target).is_dir():
        raise AdaSpecError(f"the target directory {options.target} does not exist; check --target.")
    return options.target


def _drafter_sentence(drafter: Path, target: str, config: AdaSpecConfig) -> str:
    # Imported here: torch takes seconds, and --help should not.
    from adaspec.drafters.checkpoint import check_drafter_for_target, read_drafter_config

    if Path(target).is_dir():
        block = check_drafter_for_target(drafter, Path(target)).block_size
    else:  # a hub name: SGLang fetches the target and checks the pair before it loads either
        block = read_drafter_config(drafter).block_size
    width = config.verify.width(block)
    return f"Drafter: {drafter}; drafts blocks of {block} tokens, the target verifies {width}."


def _device_sentence() -> str:
    import torch

    count = torch.cuda.device_count()
    return f"Device: CUDA, {count} visible." if count else "Device: CPU (no GPU was found)."
