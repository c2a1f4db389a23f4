"""Everything `adaspec train` can be told, as one typed TOML file."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from adaspec.errors import AdaSpecError

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class DrafterSection(_Section, frozen=True):
    """Shape of the drafter; what is left out is taken from the target.

    Attributes:
        mask_token_id: a token the target never meets; ``None`` takes the tokenizer's mask token.
        target_layer_ids: tapped layers; ``None`` spreads ``num_taps`` as DFlash does.
        initialise_from: target layers whose weights the drafter's layers start from, one a layer
            (shapes must agree); ``None`` starts from small random weights.
        length_head_width: width of AdaFlash's length head, which the policy ``adaflash`` reads;
            ``None`` trains none.
    """

    block_size: Annotated[int, msgspec.Meta(ge=2)] = 16
    num_layers: PositiveInt = 3
    intermediate_size: PositiveInt | None = None
    num_taps: PositiveInt = 5
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: Annotated[int, msgspec.Meta(ge=0)] | None = None
    initialise_from: tuple[int, ...] | None = None
    length_head_width: PositiveInt | None = None


class GenerateSection(_Section, frozen=True):
    """How the target writes the trajectories.

    Attributes:
        temperature: 0 is greedy.
        max_prompt_tokens: longer prompts are left out.
        batch_rows: sequences decoded together at most.
        cache_tokens: tokens of key-value cache at most, over all rows.
    """

    max_new_tokens: PositiveInt = 512
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    max_prompt_tokens: PositiveInt = 1024
    batch_rows: PositiveInt = 64
    cache_tokens: PositiveInt = 100_000


class OptimSection(_Section, frozen=True):
    """Optimiser and schedule: linear warm-up, then a cosine down to ``final_lr_share`` of the peak.

    Attributes:
        name: ``muon`` uses Muon for the weight matrices and AdamW for the norms.
        max_steps: end of the schedule in steps.
        max_seconds: end of the schedule in seconds of training; whichever comes first ends it. With
            ``None`` the run is a function of its inputs alone.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: PositiveFloat = 6e-4
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.01
    warmup_share: Fraction = 0.04
    final_lr_share: Fraction = 0.02
    grad_clip: PositiveFloat = 1.0
    max_steps: PositiveInt = 1000
    max_seconds: PositiveFloat | None = None


class DataSection(_Section, frozen=True):
    """Batches.

    Attributes:
        tokens_per_batch: trajectory tokens of a batch, padding included.
        blocks_per_batch: draft blocks trained on in a batch.
        heldout_share: share of the trajectories kept for evaluation, at least one.
    """

    tokens_per_batch: PositiveInt = 8192
    blocks_per_batch: PositiveInt = 512
    heldout_share: Fraction = 0.02


class TrainConfig(_Section, frozen=True):
    """A training run.

    Attributes:
        loss_decay: DFlash's position decay, in block positions.
        precision: type of the matrix products and of the target (weights of the drafter are float32
            throughout); ``auto`` is bfloat16 on a GPU and float32 on a CPU.
        log_every, evaluate_every, checkpoint_every: in steps.
    """

    seed: int = 0
    drafter: DrafterSection = DrafterSection()
    generate: GenerateSection = GenerateSection()
    optim: OptimSection = OptimSection()
    data: DataSection = DataSection()
    loss_decay: PositiveFloat = 7.0
    loss_chunk_rows: PositiveInt = 8192
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    log_every: PositiveInt = 20
    evaluate_every: PositiveInt = 200
    checkpoint_every: PositiveInt = 200
    tensorboard: bool = False


def load_train_config(path: Path) -> TrainConfig:
    """Read a TOML file.

    Raises:
        AdaSpecError: if it is missing, is not TOML, or holds an unknown key or a bad value.
    """
    try:
        return msgspec.toml.decode(path.read_bytes(), type=TrainConfig)
    except OSError as error:
        raise AdaSpecError(
            f"the training configuration {path} cannot be read ({error.strerror}); check the path."
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AdaSpecError(f"{path} is not a valid training configuration: {error}.") from None
