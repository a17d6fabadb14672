"""Tiny models with random weights, for engines without a GPU.

    models.py NAME DIR [SEED]

NAME is dense, gptoss, gemma3 or qwen3next. The weights are wide enough that greedy
tokens depend on every part of the cache: a wrong byte shows.
"""

from __future__ import annotations

import sys
from typing import Any

NAMES = ("dense", "gptoss", "gemma3", "qwen3next")
WINDOW = 128  # tokens that sliding-window layers see
SPREAD = 0.12  # standard deviation of the weights


def _config(name: str) -> Any:
    import transformers as t

    common = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2 if name == "dense" else 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    if name == "dense":
        return t.LlamaConfig(**common)
    experts = {"num_experts_per_tok": 2}
    window, full = "sliding_attention", "full_attention"
    if name == "gptoss":
        return t.GptOssConfig(
            **common,
            **experts,
            head_dim=64,
            num_local_experts=4,
            sliding_window=WINDOW,
            layer_types=[window, full] * 2,
        )
    if name == "gemma3":
        return t.Gemma3TextConfig(
            **common,
            head_dim=32,
            sliding_window=WINDOW,
            layer_types=[window] * 3 + [full],
        )
    if name == "qwen3next":
        return t.Qwen3NextConfig(
            **common,
            **experts,
            head_dim=32,
            num_experts=4,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_conv_kernel_dim=4,
        )
    raise SystemExit(f"no model {name!r}; there are {', '.join(NAMES)}")


def make(name: str, folder: str, seed: int) -> None:
    """Writes a checkpoint; the same seed gives the same weights."""
    import torch
    import transformers

    config = _config(name)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32)
    with torch.no_grad():
        for part, weights in model.named_parameters():
            if weights.dim() >= 2 and "conv" not in part and "norm" not in part:
                weights.normal_(0, SPREAD)
    model.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    make(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 7)
