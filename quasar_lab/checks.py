"""What callers hand in, checked: each function returns the value in one form or raises UserError.

One line with the name of the argument, the value, and what is allowed. Anything may come in: text,
None, NaN, numpy's numbers, a tokenizer's whole output.
"""

import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quasar_lab.errors import UserError


def check_whole(name: str, value: object, low: int = 1) -> int:
    """The value as an int of at least `low`; UserError otherwise."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or int(value) < low:
        raise UserError(f"{name} is {value!r}: it must be a whole number >= {low}")
    return int(value)


def check_number(name: str, value: Any, low: float = 0.0, *, above: float | None = None) -> float:
    """The value as a finite float, at least `low` or, where given, greater than `above`."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or (value < low if above is None else value <= above):
        allowed = f"of at least {low:g}" if above is None else f"above {above:g}"
        raise UserError(f"{name} is {value!r}: it must be a finite number {allowed}")
    return float(value)


def check_callable(name: str, value: object) -> None:
    """UserError unless the value is None or can be called."""
    if value is not None and not callable(value):
        raise UserError(f"{name} is {value!r}: it must be a function, or None")


def check_flag(name: str, value: object) -> None:
    """UserError unless the value is True or False."""
    if not isinstance(value, bool):
        raise UserError(f"{name} is {reprlib.repr(value)}: it must be True or False")


def check_instance(name: str, value: object, kind: type) -> None:
    """UserError unless the value is an object of the class `kind`."""
    if not isinstance(value, kind):
        raise UserError(f"{name} is {reprlib.repr(value)}: it must be a {kind.__name__} object")


def check_integers(name: str, values: Any) -> Tensor:
    """A list, array or tensor of whole numbers, of any shape, as a LongTensor on the CPU."""
    try:
        tensor = torch.as_tensor(values)
    # torch has no one error for what it cannot convert
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UserError(
            f"{name} is {reprlib.repr(values)}: it must be whole numbers, in a list or a tensor"
        ) from None
    kinds = (tensor.is_floating_point(), tensor.is_complex(), tensor.dtype == torch.bool)
    if tensor.numel() and any(kinds):
        raise UserError(
            f"{name} is {reprlib.repr(values)} of dtype {tensor.dtype}: it must be whole numbers"
        )
    return tensor.long().cpu()


def check_rows(name: str, values: Any) -> Tensor:
    """Numbers in two dimensions, the second not empty, as they are or as a tensor."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UserError(
            f"{name} is {reprlib.repr(values)}: it must be a tensor [rows, vocabulary]"
        ) from None
    if tensor.ndim != 2 or tensor.shape[1] == 0:
        raise UserError(
            f"{name} has shape {tuple(tensor.shape)}: it must be [rows, vocabulary], not empty"
        )
    return tensor


def check_prompt(prompt_ids: object, vocab_size: int | None) -> list[int]:
    """The prompt as a list of ints; a tokenizer's output is asked for its input_ids."""
    if isinstance(prompt_ids, Mapping):
        if "input_ids" not in prompt_ids:
            raise UserError(f"the prompt has no input_ids, only {', '.join(map(str, prompt_ids))}")
        prompt_ids = prompt_ids["input_ids"]
    rows = prompt_ids if isinstance(prompt_ids, Sequence) else ()
    if isinstance(prompt_ids, str) or (rows and isinstance(rows[0], str)):
        raise UserError("the prompt is text: encode it first, e.g. tokenizer(text).input_ids")
    if len(rows) > 1 and isinstance(rows[0], Sequence):  # perhaps of different lengths
        raise UserError(_batch_error(len(rows)))
    ids = check_integers("the prompt", prompt_ids)
    if ids.ndim == 2 and ids.shape[0] > 1:
        raise UserError(_batch_error(ids.shape[0]))
    if ids.numel() == 0:
        raise UserError("the prompt is empty: it must have at least one token, e.g. the BOS token")
    if ids.ndim > 2:
        raise UserError(
            f"the prompt has shape {tuple(ids.shape)}: it must be whole numbers of shape [S] or "
            "[1, S]"
        )
    tokens: list[int] = ids.reshape(-1).tolist()
    check_tokens("the prompt holds", tokens, vocab_size)
    return tokens


def _batch_error(size: int) -> str:
    return f"a batch of {size} prompts was passed: generate decodes one; call it once per prompt"


def check_tokens(subject: str, tokens: Sequence[int], vocab_size: int | None) -> None:
    """UserError unless every token lies in the vocabulary (None: it is not known)."""
    for token in tokens:
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            high = "the end of the vocabulary" if vocab_size is None else vocab_size - 1
            raise UserError(f"{subject} token {token}: it must lie between 0 and {high}")


def check_drafter(drafter: Any, target: object = None) -> None:
    """UserError for what is no drafter, or what decodes with the very target it drafts for.

    The object that verifies cannot draft as well: one KV cache would hold two texts.
    """
    methods = ("reset", "propose", "extend")
    if isinstance(drafter, type) or not all(hasattr(drafter, name) for name in methods):
        name = drafter.__name__ if isinstance(drafter, type) else type(drafter).__name__
        raise UserError(
            f"drafter is {'the class ' * isinstance(drafter, type)}{name}: it must be an object "
            "with reset, propose and extend, such as NGramDrafter()"
        )
    while target is not None and drafter is not None:
        if getattr(drafter, "target", None) is target:
            raise UserError(
                f"drafter and target are the same {type(target).__name__} and would overwrite each "
                "other's KV cache: build a second one (the model itself can be shared)"
            )
        drafter = getattr(drafter, "drafter", None)
