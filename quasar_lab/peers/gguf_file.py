"""Write a model as a GGUF file in Q8_0, so that llama.cpp can run the very same weights.

Q8_0 keeps blocks of 32 weights as bytes with one fp16 scale: 8.5 bits a weight, the output layer
included. The file holds no vocabulary, as prompts and answers are token ids here.
"""

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from quasar_lab.errors import UserError

# model_type -> llama.cpp's name of the architecture
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """The name that llama.cpp gives a parameter of a Hugging Face model."""
    module, _, kind = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    _, _, index, rest = module.split(".", 3)
    return f"blk.{index}.{_NAMES[rest]}.{kind}"


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows for a rotation of neighbours (2i, 2i + 1) where Hugging Face turns (i, i + d/2)."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def write_q8_0(model: Any, path: Path) -> None:
    """Write a Hugging Face model in full precision to `path`.

    Raises UserError for an architecture or a rotary scaling that this writer does not know.
    """
    import gguf

    config = model.config
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"a GGUF file of {config.model_type!r} is not written here: only {known}")
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default" or getattr(config, "sliding_window", None):
        raise UserError(f"a GGUF file with {rope.get('rope_type')} rotary scaling or a sliding "
                        "window is not written here")  # fmt: skip
    arch = ARCHITECTURES[config.model_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, arch)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_tokenizer_model("no_vocab")
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for name, parameter in model.named_parameters():  # a tied tensor comes once
        weight = parameter.detach().float()
        if arch == "llama" and ".q_proj" in name:
            weight = _interleaved(weight, config.num_attention_heads)
        if arch == "llama" and ".k_proj" in name:
            weight = _interleaved(weight, config.num_key_value_heads)
        values = np.ascontiguousarray(weight.cpu().numpy())
        if values.ndim == 2 and values.shape[1] % 32 == 0:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, q8_0), raw_dtype=q8_0)
        else:
            writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
