"""Token ids in whatever form the user has them, as plain rows without padding."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from quasar_lab.errors import UserError
from quasar_lab.structure import describe


def unpadded(batch: object, index: int, model: nn.Module) -> list[Tensor]:
    """One batch as a list of LongTensor[B, S] without padding."""
    mask: object = None
    if isinstance(batch, Mapping):
        if "input_ids" not in batch:
            raise UserError(f"batch {index} has no 'input_ids', only {sorted(map(str, batch))}")
        ids, mask = batch["input_ids"], batch.get("attention_mask")
    elif isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[0], Tensor):
        ids, mask = batch
    else:
        ids = batch
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise UserError(f"batch {index} is {describe(ids)}: pass token ids as a LongTensor")
    if ids.ndim not in (1, 2) or ids.numel() == 0:
        raise UserError(
            f"batch {index} has shape {list(ids.shape)}: pass ids [tokens] or [batch, tokens]"
        )
    ids = ids.reshape(-1, ids.shape[-1]).long()
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    vocabulary = getattr(embedding, "num_embeddings", None)
    if ids.min() < 0 or (vocabulary is not None and ids.max() >= vocabulary):
        raise UserError(
            f"batch {index} has token id {int(ids.min() if ids.min() < 0 else ids.max())}, the "
            f"model's ids go from 0 to {(vocabulary or 0) - 1}"
        )
    if mask is None:
        rows = [ids]
    else:
        if not isinstance(mask, Tensor) or mask.numel() != ids.numel():
            raise UserError(
                f"batch {index}: the attention mask must be a tensor of shape {list(ids.shape)}"
            )
        keep = mask.reshape(ids.shape).bool()
        rows = (
            [ids] if keep.all() else [row[kept][None] for row, kept in zip(ids, keep, strict=True)]
        )
        if any(row.numel() == 0 for row in rows):
            raise UserError(f"batch {index} has a sequence that is all padding")
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if limit is not None and max(row.shape[-1] for row in rows) > limit:
        raise UserError(
            f"batch {index} has {max(row.shape[-1] for row in rows)} tokens, the model takes "
            f"{limit}"
        )
    return rows
