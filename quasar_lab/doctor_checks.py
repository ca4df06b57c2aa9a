"""The single checks of `quasar-lab doctor`: each looks at one thing and returns what it found.

Nothing is fetched, measured or changed. A check may raise: the doctor makes a finding of it.
"""

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from quasar_lab.course import LESSONS

MACHINE, PACKAGES, BACKENDS, MODELS = "machine", "packages", "INT8 backends", "models"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_NEEDED_EXTRAS = ("core", "notebooks")
_CACHE_GIGABYTES = 1.5  # the default model while it is de-quantised, with the fetched wheel


@dataclass(frozen=True, slots=True)
class Finding:
    """state: "ok", "absent" (does without) or "missing" (something will not work)."""

    section: str
    name: str
    state: str
    detail: str
    remedy: str = ""


def _python() -> Iterator[Finding]:
    version = sys.version_info
    good = (3, 11) <= version[:2] < (3, 14)
    yield Finding(
        MACHINE, "Python", "ok" if good else "missing",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "" if good else "use Python 3.11, 3.12 or 3.13",
    )  # fmt: skip


def _memory() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    enough = memory.available > max(lesson.memory_gigabytes for lesson in LESSONS) * 1e9
    yield Finding(
        MACHINE, "memory", "ok" if enough else "absent",
        f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free",
        "" if enough else "some notebooks want 4 GB: close other programs and other kernels",
    )  # fmt: skip


def _threads() -> Iterator[Finding]:
    import torch

    from quasar_lab.machine import processor_name

    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    limited = threads < cores and "OMP_NUM_THREADS" in os.environ
    yield Finding(MACHINE, "processor", "ok", f"{processor_name()}, {cores} logical cores")
    yield Finding(
        MACHINE, "threads", "absent" if limited else "ok", f"torch uses {threads}",
        f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} holds it back: unset it before measuring"
        if limited else "",
    )  # fmt: skip


def _instructions() -> Iterator[Finding]:
    from quasar_lab.tiles.instruction_sets import INSTRUCTION_SETS, best_instruction_set

    best = best_instruction_set()
    here = [name for name, each in INSTRUCTION_SETS.items() if each.available]
    # without AVX2 the sums are still exact
    state = "absent" if best == "portable" else "ok"
    detail = f"INT8 products use {best}" + (f" (here: {', '.join(here)})" if len(here) > 1 else "")
    remedy = "" if state == "ok" else "exact, but slow: no AVX2, AVX-512 or VNNI on this processor"
    yield Finding(MACHINE, "AVX2 / AVX-512 / VNNI", state, detail, remedy)


def _gpu() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        name = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
        yield Finding(MACHINE, "GPU", "ok", name)
        return
    remedy = (
        "nothing wants one; an NVIDIA GPU wants its driver and a CUDA build of torch (pytorch.org)"
    )
    if shutil.which("nvidia-smi"):
        remedy = "there is an NVIDIA driver: install a CUDA build of torch (pytorch.org)"
    elif torch.version.cuda:
        remedy = "torch is a CUDA build, but no GPU answers: check the driver"
    yield Finding(MACHINE, "GPU", "absent", "none that torch can use", remedy)


def _triton() -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        remedy = (
            "to read and check the GPU kernels: python -m pip install -c constraints.txt -e "
            "'.[triton-ci]' (a CUDA build of torch brings its own)"
        )
        yield Finding(MACHINE, "Triton", "absent", "not installed", remedy)
        return
    yield Finding(MACHINE, "Triton", "ok", f"{version} (compiles and interprets without a GPU)")


def find_browser() -> str | None:
    """The path of a Chromium or Chrome that can be driven, or None."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def _browser() -> Iterator[Finding]:
    path = find_browser()
    detail = path or "no Chromium or Chrome on the path (JupyterLab opens in any browser)"
    remedy = "" if path else "only the browser tests want it: apt-get install chromium"
    yield Finding(MACHINE, "browser", "ok" if path else "absent", detail, remedy)


def _disk() -> Iterator[Finding]:
    from quasar_lab.loading import cache_directory, is_cached

    cache = cache_directory()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free / 1e9
    enough = free > _CACHE_GIGABYTES or is_cached()
    writable = os.access(existing, os.W_OK)
    remedy = "make room, or set QUASAR_LAB_CACHE to another folder"
    yield Finding(
        MACHINE, "disk", "ok" if enough and writable else "missing",
        f"{free:.1f} GB free for {cache}" + ("" if writable else ", not writable"),
        "" if enough and writable else remedy,
    )  # fmt: skip


def _packages() -> Iterator[Finding]:
    """The extras of this package: which of their requirements are installed, and new enough."""
    from packaging.requirements import Requirement

    distribution = importlib.metadata.distribution("quasar-lab")
    listed = [Requirement(line) for line in distribution.requires or ()]
    for extra in ("core", *(distribution.metadata.get_all("Provides-Extra") or ())):
        requirements = [r for r in listed if _belongs(r, extra)]
        lacking = [str(r).split(";")[0].strip() for r in requirements if not _installed(r)]
        state = "ok" if not lacking else "missing" if extra in _NEEDED_EXTRAS else "absent"
        what = "." if extra == "core" else f".[{extra}]"
        yield Finding(
            PACKAGES, extra, state,
            f"lacking: {', '.join(lacking)}" if lacking else _versions(requirements),
            f"python -m pip install -c constraints.txt -e '{what}'" if lacking else "",
        )  # fmt: skip


def _belongs(requirement: Any, extra: str) -> bool:
    marker = requirement.marker
    if extra == "core":
        return marker is None or marker.evaluate({"extra": ""})
    return "extra" in str(marker) and marker.evaluate({"extra": extra})


def _installed(requirement: Any) -> bool:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def _versions(requirements: Iterable[Any]) -> str:
    names = [requirement.name for requirement in requirements][:3]
    shown = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return shown + (", ..." if len(list(requirements)) > len(names) else "")


def _backends() -> Iterator[Finding]:
    from quasar_lab.int8_gemm import available_backends

    for name, answer in available_backends().items():
        state = "ok" if answer == "ok" else "absent"
        yield Finding(BACKENDS, name, state, "works here" if state == "ok" else answer)


def _models() -> Iterator[Finding]:
    from quasar_lab.loading import DEFAULT_MODEL, PRESETS, is_cached

    for name, preset in PRESETS.items():
        here = is_cached(name)
        use = "" if name == DEFAULT_MODEL else ", if you want to run it: no notebook needs it"
        remedy = "" if here else f"quasar-lab fetch {name}{use}"
        detail = "in the cache" if here else f"not fetched ({preset.gigabytes:.1f} GB)"
        yield Finding(MODELS, name, "ok" if here else "absent", detail, remedy)


CHECKS: dict[str, Callable[[], Iterable[Finding]]] = {
    "Python": _python,
    "torch": _threads,
    "instructions": _instructions,
    "memory": _memory,
    "GPU": _gpu,
    "Triton": _triton,
    "browser": _browser,
    "disk": _disk,
    "packages": _packages,
    "backends": _backends,
    "models": _models,
}
