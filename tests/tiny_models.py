"""Tiny random models of each supported family: a few thousand weights, built in milliseconds."""

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 97
HIDDEN = 32

_SHARED = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)

_FAMILIES = {
    "llama": ("LlamaConfig", dict(_SHARED, tie_word_embeddings=True)),
    "llama_untied": ("LlamaConfig", dict(_SHARED, tie_word_embeddings=False)),
    # openPangu-Embedded is a Llama with biases on the attention projections
    "pangu": (
        "LlamaConfig",
        dict(_SHARED, tie_word_embeddings=False, attention_bias=True),
    ),
    "mistral": ("MistralConfig", dict(_SHARED, sliding_window=None)),
    "mistral_sliding": ("MistralConfig", dict(_SHARED, sliding_window=8)),
    "qwen2": ("Qwen2Config", dict(_SHARED, tie_word_embeddings=True)),
    "qwen3": ("Qwen3Config", dict(_SHARED, head_dim=16, tie_word_embeddings=True)),
    "gemma": ("GemmaConfig", dict(_SHARED, head_dim=8)),
    "phi3": ("Phi3Config", dict(_SHARED)),
    "opt": (
        "OPTConfig",
        dict(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            word_embed_proj_dim=HIDDEN,
            ffn_dim=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=512,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
    ),
    "gpt2": (
        "GPT2Config",
        dict(
            vocab_size=VOCAB,
            n_embd=HIDDEN,
            n_inner=48,
            n_layer=3,
            n_head=4,
            n_positions=512,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
}

# phi3 fuses its linears: it is here for its rotary scaling only
FAMILIES = tuple(family for family in _FAMILIES if family != "phi3")


def tiny_model(
    family: str = "llama", *, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: object
) -> PreTrainedModel:
    """A random model in eval mode whose weights are large enough for text to vary.

    Norm weights and biases are randomised as well: at their initial ones and zeros a folding or
    a parity test would pass without touching them.
    """
    config_name, settings = _FAMILIES[family]
    config = getattr(transformers, config_name)(**{**settings, **overrides})
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                offset = 0.0 if name.endswith("bias") or family == "gemma" else 1.0
                parameter.data.normal_(0.0, 0.2).add_(offset)
            else:
                parameter.data.normal_(0.0, 0.3)
    return model.to(dtype).eval().requires_grad_(False)
