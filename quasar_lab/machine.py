"""What this machine is: the facts without which a measurement cannot be read."""

import os
import platform
from pathlib import Path
from typing import Any


def processor_name() -> str:
    """The processor's marketing name where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe_machine() -> dict[str, Any]:
    """Processor, threads, INT8 instructions, GPU and versions, as plain JSON values."""
    import torch
    import transformers

    from quasar_lab import __version__
    from quasar_lab.tiles.instruction_sets import best_instruction_set

    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "int8_instructions": best_instruction_set(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "quasar_lab": __version__,
    }
