"""What quantisation did to each linear, and why."""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
from torch import nn

from quasar_lab.activation_stats import ActivationStats
from quasar_lab.errors import UserError
from quasar_lab.folding import Fold
from quasar_lab.structure import linear_layers, weight_modules

# A channel this many times above the median makes a token's INT8 step too coarse for the rest.
OUTLIER_RATIO = 100.0


@dataclass(slots=True)
class QuantizationRecord:
    """What a quantised model remembers: its configuration, the folded scales and the report.

    calibration: how much text the statistics come from, in words.
    """

    config: object
    fold: Fold
    report: pd.DataFrame
    sensitivity: pd.DataFrame | None = None
    calibration: str = ""


def quantization_record(model: nn.Module) -> QuantizationRecord:
    """The record that `quantize` left on its result."""
    record = getattr(model, "_quantization", None)
    if not isinstance(record, QuantizationRecord):
        raise UserError(f"this {type(model).__name__} does not come from quantize()")
    return record


def quantization_report(model: nn.Module) -> pd.DataFrame:
    """What `quantize` did, one row a linear.

    name; shape; precision ("W8A8" or "full"); smoothing (the method, or "none"); reason (why it is
    not smoothed or not quantised, else empty); outlier_ratio (largest over median channel absmax
    of the input); outlier (ratio above 100).
    """
    return quantization_record(model).report.copy()


def report_table(
    model: nn.Module,
    skipped: Mapping[str, str],
    smoothing_of: Mapping[str, str],
    unsmoothed: Mapping[str, str],
    stats: Mapping[str, ActivationStats] | None,
) -> pd.DataFrame:
    """The rows of `quantization_report`."""
    rows = []
    linears = linear_layers(model)
    for name, module in weight_modules(model).items():
        ratio = stats[name].outlier_ratio if stats is not None and name in stats else float("nan")
        if name in skipped:
            reason = f"skipped: matches {skipped[name]!r}"
        elif name not in linears:
            reason = f"skipped: a {type(module).__name__} is no linear"
        elif name not in smoothing_of:
            reason = "not smoothed: " + unsmoothed.get(name, "in no smoothed group")
        else:
            reason = ""
        rows.append(
            {
                "name": name,
                "shape": tuple(next(module.parameters(recurse=False)).shape),
                "precision": "full" if name in skipped or name not in linears else "W8A8",
                "smoothing": smoothing_of.get(name, "none"),
                "reason": reason,
                "outlier_ratio": ratio,
                "outlier": ratio > OUTLIER_RATIO,
            }
        )
    return pd.DataFrame(rows)
