"""A target small enough for unit tests: a random Llama over a byte vocabulary, with a real tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 260
END_TOKEN_ID = 257
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": END_TOKEN_ID,
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_target(folder: Path, seed: int = 0) -> Path:
    """Write an HF folder of a random target; the same seed gives the same model."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).half()

    hidden, inner, heads, kv_heads, width = 48, 96, 4, 2, 16
    tensors = {"model.embed_tokens.weight": normal(VOCAB_SIZE, hidden, std=0.5), "model.norm.weight": torch.ones(hidden).half()}
    for index in range(CONFIG["num_hidden_layers"]):  # type: ignore[call-overload]
        prefix = f"model.layers.{index}."
        tensors |= {
            prefix + "input_layernorm.weight": torch.ones(hidden).half(),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden).half(),
            prefix + "self_attn.q_proj.weight": normal(heads * width, hidden, std=0.2),
            prefix + "self_attn.k_proj.weight": normal(kv_heads * width, hidden, std=0.2),
            prefix + "self_attn.v_proj.weight": normal(kv_heads * width, hidden, std=0.2),
            prefix + "self_attn.o_proj.weight": normal(hidden, heads * width, std=0.2),
            prefix + "mlp.gate_proj.weight": normal(inner, hidden, std=0.2),
            prefix + "mlp.up_proj.weight": normal(inner, hidden, std=0.2),
            prefix + "mlp.down_proj.weight": normal(hidden, inner, std=0.2),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, and a few special ones."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<|im_end|>", "<|im_start|>", "<pad>"])
    return tokenizer
