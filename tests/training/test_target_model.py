"""What training reads of the target: taps, final states, greedy tokens."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from adaspec.errors import AdaSpecError
from adaspec.training.target_model import TargetModel, load_target


def test_a_tap_is_the_output_of_its_layer(target: TargetModel) -> None:
    outputs: dict[int, torch.Tensor] = {}
    hooks = [
        layer.register_forward_hook(
            lambda module, args, output, number=number: outputs.__setitem__(
                number, output[0] if isinstance(output, tuple) else output
            )
        )
        for number, layer in enumerate(target.decoder.layers)
    ]
    tokens = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(0))
    taps, _ = target.read(tokens, (0, 1))
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(taps, torch.cat([outputs[0], outputs[1]], dim=-1))


def test_padding_on_the_right_changes_nothing_before_it(target: TargetModel) -> None:
    tokens = torch.randint(3, 250, (1, 9), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([tokens, torch.zeros(1, 7, dtype=torch.long)], dim=1)
    for short, long in zip(target.read(tokens, (0, 1)), target.read(padded, (0, 1)), strict=True):
        torch.testing.assert_close(short, long[:, :9], rtol=1e-5, atol=1e-5)


def test_greedy_tokens_are_the_models_choice_for_each_wanted_position(
    target: TargetModel, target_directory: Path
) -> None:
    tokens = torch.randint(3, 250, (3, 11), generator=torch.Generator().manual_seed(0))
    logits = LlamaForCausalLM.from_pretrained(target_directory)(tokens).logits
    wanted = torch.rand(3, 11, generator=torch.Generator().manual_seed(1)) < 0.6
    _, final = target.read(tokens, (0,))
    found = target.greedy_tokens(final, wanted, chunk_rows=4)
    for row in range(3):
        for position in range(11):
            counted = position > 0 and wanted[row, position]
            expected = int(logits[row, position - 1].argmax()) if counted else 0
            assert found[row, position] == expected


def test_what_is_no_model_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdaSpecError, match=r"no config\.json"):
        load_target(tmp_path, torch.device("cpu"), torch.float32)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(AdaSpecError, match="cannot be loaded"):
        load_target(tmp_path, torch.device("cpu"), torch.float32)


def test_sliding_windows_are_refused(target_directory: Path, tmp_path: Path) -> None:
    config = json.loads((target_directory / "config.json").read_text())
    layers = ["full_attention", "sliding_attention", "full_attention"]
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    config |= {"layer_types": layers, "use_sliding_window": True, "sliding_window": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(target_directory / "model.safetensors")
    with pytest.raises(AdaSpecError, match="full attention"):
        load_target(tmp_path, torch.device("cpu"), torch.float32)
