"""What `make serving-check` measured and recorded, for those who run no server themselves."""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from quasar_lab.errors import UserError
from quasar_lab.tasks import data_folder


def recorded_serving(path: str | Path | None = None) -> dict[str, Any]:
    """The figures of a serving check: machine, versions, settings, "table" and "checks".

    path: a file that `benchmarks/serving_check.py` wrote; None takes the project's own. "table" is
    a DataFrame with the columns of `EndpointRun.table`, one row a method and concurrency.
    """
    file = data_folder() / "serving.json" if path is None else Path(path)
    try:
        figures = json.loads(file.read_text(encoding="utf-8"))
        figures["table"] = pd.DataFrame(figures["table"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} holds no figures of a serving check: run it first") from error
    return figures
