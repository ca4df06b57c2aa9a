"""Get a model: the default one, a preset, any Hugging Face Hub id or any local folder."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from quasar_lab import default_model
from quasar_lab.default_model import cache_directory
from quasar_lab.errors import UserError

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A causal language model in eval mode with its tokenizer; parameters need no gradient."""

    model: PreTrainedModel
    tokenizer: Any
    name: str

    def encode_chat(self, text_or_messages: object) -> Int64[Tensor, " tokens"]:
        """Token ids of a prompt, ready for generation, on the model's device."""
        messages = text_or_messages
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if getattr(self.tokenizer, "chat_template", None):
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            text = "\n\n".join(message["content"] for message in messages)
            ids = self.tokenizer(text)["input_ids"]
        return torch.tensor(ids, dtype=torch.long, device=self.model.device)

    def decode(self, ids: object, *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        if isinstance(ids, Tensor):
            ids = ids.tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def load(
    name_or_path: object = DEFAULT_MODEL,
    *,
    device: object = "auto",
    dtype: object = None,
    cache_dir: object = None,
) -> LanguageModel:
    """Load a causal language model and its tokenizer."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else "auto"
    folder = (
        default_model.prepare(cache_dir=cache_dir)
        if name_or_path == DEFAULT_MODEL
        else Path(name_or_path)
    )
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, use_safetensors=True)
    model = model.to(device).eval().requires_grad_(False)
    return LanguageModel(model, tokenizer, str(name_or_path))
