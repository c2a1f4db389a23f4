"""Tiny random models that the tests write themselves: a Llama target and DFlash drafters."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 512
HIDDEN = 64
LAYERS = 3
TAPS = (0, 1)  # SGLang captures what enters a layer, so the last layer's output cannot be tapped
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
CONTEXT = 2048
BOS, EOS, MASK = 0, 1, 2
_SPECIAL = ("<s>", "</s>", "<mask>")
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
)


def write_target(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random Llama with a byte-level tokenizer of 512 entries as an HF directory."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        # Wide enough for clear winners: near-ties would make greedy comparisons a matter of luck.
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return directory


def write_drafter(directory: Path, *, block_size: int = 4, seed: int = 1) -> Path:
    """Write a random z-lab DFlash drafter for `write_target`'s model, in SGLang's format."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "num_target_layers": LAYERS,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "block_size": block_size,
        "layer_types": ["full_attention"],
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
    }
    tensors = {
        "fc.weight": random(HIDDEN, HIDDEN * len(TAPS)),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "layers.0.self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
        "layers.0.self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        "layers.0.self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        "layers.0.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
        "layers.0.self_attn.q_norm.weight": torch.ones(HEAD_DIM),
        "layers.0.self_attn.k_norm.weight": torch.ones(HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": random(128, HIDDEN),
        "layers.0.mlp.up_proj.weight": random(128, HIDDEN),
        "layers.0.mlp.down_proj.weight": random(HIDDEN, 128),
        "layers.0.input_layernorm.weight": torch.ones(HIDDEN),
        "layers.0.post_attention_layernorm.weight": torch.ones(HIDDEN),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, directory / "model.safetensors")
    return directory


def _tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*_SPECIAL, *alphabet]
    tokens += [f"<unused{i}>" for i in range(VOCAB_SIZE - len(tokens))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=_CHAT_TEMPLATE,
        model_max_length=CONTEXT,
    )
