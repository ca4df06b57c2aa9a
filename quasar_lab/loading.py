"""Get a model: the default one, a preset, any Hugging Face Hub id or any local folder.

`load` is the first line of every notebook. The files come from `quasar_lab.checkpoints`; here they
become a language model with its tokenizer. Only safetensors are read, and a model's own Python
code runs only with explicit consent.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from quasar_lab.checkpoints import default_model
from quasar_lab.checkpoints.build import build, parse_device, parse_dtype
from quasar_lab.checkpoints.cache import cache_directory
from quasar_lab.checkpoints.conversion import is_complete
from quasar_lab.checkpoints.folder import check_config, check_files, one_line
from quasar_lab.checkpoints.hub import cached_repository, fetch_repository
from quasar_lab.checkpoints.names import DEFAULT_MODEL, PRESETS, Preset, Source, resolve
from quasar_lab.errors import UserError

__all__ = [
    "DEFAULT_MODEL",
    "PRESETS",
    "LanguageModel",
    "Preset",
    "cache_directory",
    "fetch",
    "is_cached",
    "load",
]


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A causal language model (eval mode, no gradients) with its tokenizer and its name."""

    model: PreTrainedModel
    tokenizer: Any
    name: str

    def encode_chat(
        self, text_or_messages: object, **template_options: object
    ) -> Int64[Tensor, " tokens"]:
        """The token ids of a prompt on the model's device, up to where the answer begins.

        A string is one user message; a list of {"role": ..., "content": ...} is a conversation.
        The tokenizer's chat template writes them out; `template_options` go to it (Qwen3:
        enable_thinking=False). A tokenizer without a template (a base model) gets a single message
        as it is and several as "User: ... Assistant: ...". Raises UserError for anything else,
        and for a conversation that the template refuses.
        """
        messages = _as_messages(text_or_messages)
        has_template = bool(getattr(self.tokenizer, "chat_template", None))
        if has_template:
            try:
                text = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **template_options
                )
            # a template raises jinja2 errors of several kinds, and TypeError for odd contents
            except Exception as error:
                raise UserError(
                    f"the chat template of {self.name} refuses these messages: {one_line(error)}"
                ) from error
        elif len(messages) == 1:
            text = messages[0]["content"]
        else:
            turns = [f"{message['role'].title()}: {message['content']}" for message in messages]
            text = "\n\n".join([*turns, "Assistant:"])
        # a template writes the special tokens itself: adding them again would double the first
        ids = self.tokenizer(text, add_special_tokens=not has_template)["input_ids"]
        if not ids:
            raise UserError(f"{text_or_messages!r} gives no token: write a prompt")
        embedding: Any = self.model.get_input_embeddings()
        if max(ids) >= embedding.weight.shape[0]:
            raise UserError(
                f"the tokenizer of {self.name} gives token {max(ids)}, the model knows "
                f"{embedding.weight.shape[0]} only: the tokenizer belongs to another model"
            )
        return torch.tensor(ids, dtype=torch.int64, device=self.model.device)

    def decode(self, ids: object, *, skip_special_tokens: bool = True) -> str:
        """The text of token ids: a tensor [S] or [1, S], a list of int, or one int."""
        numbers = ids.tolist() if hasattr(ids, "tolist") else ids
        if isinstance(numbers, int):
            numbers = [numbers]
        if isinstance(numbers, Sequence) and len(numbers) == 1 and isinstance(numbers[0], list):
            numbers = numbers[0]
        if not isinstance(numbers, Sequence) or not all(
            isinstance(number, int) and number >= 0 for number in numbers
        ):
            raise UserError(f"cannot decode {ids!r}: give one row of token ids (integers from 0)")
        return self.tokenizer.decode(list(numbers), skip_special_tokens=skip_special_tokens)


def load(
    name_or_path: object = DEFAULT_MODEL,
    *,
    device: object = "auto",
    dtype: object = None,
    cache_dir: object = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LanguageModel:
    """Load a causal language model and its tokenizer; fetch them first if they are not here.

    name_or_path: a preset (`PRESETS`), a local folder, or a Hub id such as "Qwen/Qwen3-0.6B".
    device: "auto" (cuda if there is one, else cpu) or any torch device.
    dtype: None is float32 on the CPU and the checkpoint's own on a GPU; "auto" is the
        checkpoint's own; or float32, bfloat16, float16, float64 as torch.dtype or string.
    cache_dir: where fetched files are kept; see `cache_directory` (Hub models: HF_HOME).
    revision: a branch, tag or commit of a Hub model.
    trust_remote_code: agree to run Python code that comes with the model.

    Raises UserError, one line that says what to do, for whatever is wrong with these or with the
    model's files.
    """
    source = resolve(name_or_path)
    place = parse_device(device)
    options: dict[str, Any] = dict(
        label=source.label,
        device=place,
        dtype=parse_dtype(dtype, place),
        trust_remote_code=trust_remote_code,
    )
    folder = _fetch(source, cache_dir, revision, trust_remote_code)
    try:
        model, tokenizer = build(folder, **options)
    except UserError:
        # The default model was good when it was written: it is made anew if the disk changed it.
        if source.kind != "default":
            raise
        folder = default_model.prepare(default_model.SMOLLM2, cache_dir, verify=True)
        model, tokenizer = build(folder, **options)
    if not getattr(tokenizer, "chat_template", None):
        warnings.warn(
            f"{source.label} has no chat template (a base model?): encode_chat writes plain text",
            stacklevel=2,
        )
    return LanguageModel(model, tokenizer, source.name)


def fetch(
    name: object = DEFAULT_MODEL,
    cache_dir: object = None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Fetch a model's files without loading it; returns their folder. Errors as in `load`."""
    source = resolve(name)
    folder = _fetch(source, cache_dir, revision, trust_remote_code)
    check_config(folder, source.label, trust_remote_code=trust_remote_code)
    check_files(folder, source.label)
    return folder


def is_cached(name: object = DEFAULT_MODEL, cache_dir: object = None) -> bool:
    """True if `load(name)` would find every file on this machine; never uses the network."""
    source = resolve(name)
    if source.kind == "default":
        return is_complete(default_model.folder_of(default_model.SMOLLM2, cache_dir))
    if source.kind == "folder":
        folder: Path | None = Path(source.place)
    else:
        folder = cached_repository(source.place, cache_dir=cache_dir)
    if folder is None or not (folder / "config.json").is_file():
        return False
    try:
        check_files(folder, source.label)
    except UserError:
        return False
    return True


def _fetch(
    source: Source, cache_dir: object, revision: str | None, trust_remote_code: bool
) -> Path:
    if source.kind == "hub":
        return fetch_repository(
            source.place,
            cache_dir=cache_dir,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
    if revision is not None:
        raise UserError(f"revision={revision!r} is for Hub models; {source.label} has none")
    if source.kind == "default":
        return default_model.prepare(default_model.SMOLLM2, cache_dir)
    return Path(source.place)


def _as_messages(text_or_messages: object) -> list[dict[str, str]]:
    if isinstance(text_or_messages, str):
        return [{"role": "user", "content": text_or_messages}]
    wanted = 'give a text, or a list of {"role": "user", "content": "..."}'
    if not isinstance(text_or_messages, Sequence) or not text_or_messages:
        raise UserError(f"{text_or_messages!r} is no prompt: {wanted}")
    for message in text_or_messages:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise UserError(f"{message!r} is no message: {wanted}")
    return [dict(message) for message in text_or_messages]
