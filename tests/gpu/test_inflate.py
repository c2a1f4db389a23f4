"""SmolLM2 in an 8B shape says what SmolLM2 says, within the rounding of bfloat16."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from adaspec.cli.serve_plan import BUNDLED_DRAFTER
from adaspec.drafters.checkpoint import check_drafter_for_target, load_drafter
from adaspec.target.smollm2 import ensure_smollm2
from benchmarks.inflate.fill import DFLASH_8B, LLAMA_8B
from benchmarks.inflate.models import inflate_drafter, inflate_target
from tests.gpu.conftest import PROMPTS

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
NEAR_TIE = 0.3  # nats; logits near 16 to 32 are 0.125 apart in bfloat16


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of the inflated target and drafter: 17 GB."""
    directory = tmp_path_factory.mktemp("inflated")
    target, drafter = directory / "target", directory / "drafter"
    inflate_target(ensure_smollm2(progress=print), target, LLAMA_8B, device=DEVICE)
    layers = LLAMA_8B.num_hidden_layers
    inflate_drafter(BUNDLED_DRAFTER, drafter, DFLASH_8B, target_layers=layers, device=DEVICE)
    return target, drafter


def load(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(DEVICE).eval()


@torch.no_grad()
def test_an_8b_target_and_its_drafter_are_the_small_ones(pair: tuple[Path, Path]) -> None:
    target, drafter = pair
    config = check_drafter_for_target(drafter, target)
    rows = torch.tensor([PROMPTS[0] + PROMPTS[3][-20:]], device=DEVICE)
    logits, blocks = [], []
    for model_path, drafter_path in ((ensure_smollm2(progress=print), BUNDLED_DRAFTER), pair):
        model = load(model_path)
        output = model(rows, output_hidden_states=True)
        logits.append(output.logits[0].float())
        taps = [output.hidden_states[layer + 1][0] for layer in config.target_layer_ids]
        embedding = model.get_input_embeddings().weight
        network = load_drafter(drafter_path).to(DEVICE, torch.bfloat16)
        block = network.draft(torch.cat(taps, dim=-1), int(rows[0, -1]), embedding, embedding)
        blocks.append(block[1:].float())
        del model, network
    for small, large in (logits, blocks):
        spread = (small - large).abs().max() / small.abs().max()
        assert float(spread) < 0.05
        chosen = large.argmax(-1)
        log_probs = small.log_softmax(-1)
        gap = log_probs.max(-1).values - log_probs.gather(-1, chosen[:, None])[:, 0]
        assert float(gap.median()) == 0.0
        assert float(gap.quantile(0.9)) < NEAR_TIE
