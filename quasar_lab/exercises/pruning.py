"""The exercises of notebook 07: how much to prune for the same bytes, and what L can tell."""

import math
from typing import Any

from quasar_lab.exercises import number

_EXACT = 1e-6


def equal_bytes_keep(answer: Any) -> str | None:
    """Right: the output layer is read by both, so the layers alone decide: INT8 bytes / theirs."""
    for layer_bytes, head_bytes in ((2.0, 0.5), (4.0, 1.0), (2.0, 3.0)):
        given = number(answer(layer_bytes, head_bytes))
        right = 1 / layer_bytes
        if math.isclose(given, right, rel_tol=_EXACT):
            continue
        case = f"With {layer_bytes:g} bytes a weight of the layers and a head of {head_bytes:g}"
        said = f"{case} you give {given:.4g}, not {right:.4g}."
        if math.isclose(given, layer_bytes, rel_tol=_EXACT):
            return f"{said} Turn it the other way up: a share is at most 1."
        if math.isclose(given, 1 - right, rel_tol=_EXACT):
            return f"{said} That is the share that goes; asked is the share that stays."
        if math.isclose(given, (1 + head_bytes) / (layer_bytes + head_bytes), rel_tol=_EXACT):
            return (
                f"{said} That is the ratio of the whole steps. Both read the head in full, and "
                "pruning shrinks the layers only: solve keep * layers + head = INT8 layers + head."
            )
        return f"{said} Solve keep * layers + head = INT8 layers + head for keep."
    return None


def one_draft_acceptance(answer: Any) -> str | None:
    """Right: with one drafted token L = 1 + a, an acceptance rate in disguise."""
    for length in (1.62, 1.27, 1.03):
        given = number(answer(length))
        right = length - 1
        if math.isclose(given, right, abs_tol=1e-3):
            continue
        said = f"For L = {length} you give {given:.4g}, not {right:.2f}."
        if math.isclose(given, 1 - 1 / length, rel_tol=1e-3):
            return (
                f"{said} That would hold for drafts without an end, 1 / (1 - a). Here one token is "
                "drafted: a step emits it or not, and always one more."
            )
        if math.isclose(given, length / 2, rel_tol=1e-3):
            return f"{said} L counts two chances, but the bonus or replacement token always comes."
        return f"{said} A step emits one token for sure, and the draft with chance a: L = 1 + a."
    return None
