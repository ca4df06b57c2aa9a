"""How long a text may become: where a model's positions end, or change their meaning.

A table of learned positions ends. Rotary scalings of the kinds "dynamic" and "longrope" change the
frequencies of *all* positions once a text passes the trained length: the keys that a KV cache holds
by then keep the old ones, and how many depends on how the text was cut into steps. Plain and
speculative decoding would part there, so both stop before.
"""

from typing import Any

from torch import nn

from quasar_lab.checks import check_whole
from quasar_lab.errors import UserError

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def rope_limit(model: nn.Module) -> int | None:
    """Tokens up to which a model's rotary frequencies hold; None: any number of them."""
    limits = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        config = getattr(module, "config", None)
        if kinds is None or config is None:
            continue
        parameters = getattr(config, "rope_parameters", None) or {}
        # models that mix kinds of attention have a scaling for each
        each = kinds if isinstance(kinds, dict) else {None: kinds}
        for name, kind in each.items():
            if kind in _LENGTH_DEPENDENT_ROPE:
                own = parameters if name is None else parameters.get(name, {})
                trained = own.get("original_max_position_embeddings")
                limits.append(trained or config.max_position_embeddings)
    return min(limits, default=None)


def position_table_size(model: nn.Module, max_positions: int | None) -> int | None:
    """max_positions where the model looks positions up in a table of that size (GPT-2, OPT)."""
    if max_positions is None:
        return None
    tables = [
        tensor
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        # OPT's table has two rows in front
        if tensor.ndim == 2
        and max_positions <= len(tensor) <= max_positions + 2
        and any(word in name for word in ("pos", "wpe"))
    ]
    return max_positions if tables else None


def context_length(model: nn.Module, config: Any, max_length: object = None) -> int | None:
    """Tokens that fit: max_length, by default the model's own limit; None: there is none.

    config: the model's text configuration. Raises UserError for a max_length that is no whole
    number above 0, or beyond what the model's positions allow.
    """
    own = getattr(config, "max_position_embeddings", None)
    rope, table = rope_limit(model), position_table_size(model, own)
    if max_length is None:
        return min((limit for limit in (own, rope) if limit is not None), default=None)
    wanted = check_whole("max_length", max_length)
    if rope is not None and wanted > rope:
        raise UserError(
            f"max_length is {wanted}: this model's rotary scaling changes after {rope} tokens, "
            "where cached keys stop being right; ask for no more"
        )
    if table is not None and wanted > table:
        raise UserError(
            f"max_length is {wanted}: this model has {table} learned positions; ask for no more"
        )
    return wanted
