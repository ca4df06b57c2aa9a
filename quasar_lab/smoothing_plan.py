"""Choose a smoothing scale for every group of a model, and say why where there is none."""

import warnings
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from quasar_lab.activation_stats import ActivationStats
from quasar_lab.architectures import SmoothingGroup, find_groups
from quasar_lab.errors import UserError
from quasar_lab.folding import GroupScale, group_scale
from quasar_lab.group_check import wrong_groups
from quasar_lab.structure import weight_modules


def choose_scales(
    model: nn.Module,
    stats: Mapping[str, ActivationStats] | None,
    groups: Sequence[str | SmoothingGroup],
    method: str = "m2",
    alpha: float | str = 0.5,
    *,
    num_candidates: int = 100,
    skipped: Collection[str] = (),
) -> tuple[list[GroupScale], dict[str, str]]:
    """(the scales to fold, reader -> why it gets none).

    groups: kinds of groups or `SmoothingGroup`s; skipped: linears that stay in full precision: a
    group whose readers all do is left alone. Raises UserError when scaling a norm's output would
    change the model; other groups that would are left out and say so.
    """
    if not groups:
        return [], dict.fromkeys(weight_modules(model), "smoothing is off")
    if stats is None:
        warnings.warn("without calibration statistics nothing is smoothed", stacklevel=3)
        return [], dict.fromkeys(weight_modules(model), "no calibration statistics")
    kinds = [group for group in groups if isinstance(group, str)]
    found = find_groups(model, kinds) if kinds else []
    found += [group for group in groups if isinstance(group, SmoothingGroup)]
    found = [group for group in found if not all(name in skipped for name in group.readers)]
    unsmoothed: dict[str, str] = {}
    for group in wrong_groups(model, found):
        reason = f"not exact: more than the listed modules read {group.source}"
        if group.kind == "norms":
            raise UserError(f"smoothing is {reason}; leave 'norms' out of groups")
        unsmoothed.update(dict.fromkeys(group.readers, reason))
        found.remove(group)
    chosen = [
        group_scale(model, stats, group, method, alpha, num_candidates=num_candidates)
        for group in found
    ]
    return chosen, unsmoothed
