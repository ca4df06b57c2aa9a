"""benchmarks/gpu_check.py, as far as it goes without a GPU."""

import importlib.util
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_cuda_graphs import record

from quasar_lab.cuda_graphs import GraphedSteps
from quasar_lab.int8_gemm import reference
from quasar_lab.int8_gemm.triton_tuning import Tiling
from quasar_lab.model_shapes import ModelShape
from quasar_lab.random_decoder import random_decoder

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"

# What a machine with only torch, triton and transformers lacks.
ABSENT = (
    *("jaxtyping", "beartype", "llvmlite", "numba", "pandas"),
    *("plotly", "scipy", "seaborn", "matplotlib"),
)


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def lab(gpu_check, **backend):
    return gpu_check.Lab(
        device=torch.device("cpu"),
        interpret=True,
        deadline=time.monotonic() + 100,
        clock=gpu_check.WallClock(),
        backend=SimpleNamespace(**backend),
    )


def run(*arguments: str) -> subprocess.CompletedProcess:
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({ABSENT!r}))\n"
        f"sys.argv[0] = {str(SCRIPT)!r}; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=240
    )


def test_it_runs_through_in_the_interpreter(tmp_path):
    """Guards against a script that fails on the GPU machine for a reason a CPU could have shown,
    such as an import that only the full installation has."""
    pytest.importorskip("triton", reason="triton is not installed")
    done = run("--interpret", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    assert list(results)[:4] == ["environment", "steps", "correctness", "bandwidth"]
    assert {row["tokens"] for row in results["steps"]["rows"]} == {1, 6}
    assert results["correctness"]["exact_products"] > 30
    assert len(results["bandwidth"]["products"]) == 6
    assert done.stdout.rstrip().endswith("all checks passed")


def test_a_decoder_on_a_gpu_needs_no_compiler_for_the_cpu():
    """Guards the section `steps`, which on a GPU lets the decoder choose its engine: that loaded
    numba before it looked at the device. "meta" is a device that is not the CPU, as CUDA is."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}))\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import gpu_check; gpu_check.import_backend()\n"
        "from quasar_lab.model_shapes import ModelShape\n"
        "from quasar_lab.random_decoder import random_decoder\n"
        "shape = ModelShape(2, 64, 2, 1, 32, 96, 128)\n"
        "for layers in ('bf16', 'INT8'):\n"
        "    random_decoder(shape, layers, device='meta', backend='triton')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def small_decoder(capture):
    decoder = random_decoder(
        ModelShape(2, 64, 2, 1, 32, 96, 128), "fp32", "fp32", max_length=64, engine="torch"
    )
    decoder._graphs = GraphedSteps(decoder._static_step, 64, decoder.device, capture)
    decoder.forward(torch.arange(20))
    return decoder


def test_a_graph_is_checked_against_its_kernels(gpu_check):
    """Guards the step times: of a graph that repeats an old result, or was never recorded."""
    right = small_decoder(record)
    assert gpu_check.check_graph("fp32", right, 6) < 1e-6 and right.length == 20
    with pytest.raises(gpu_check.CheckError, match="graph of 6 tokens, fp32: relative error"):
        gpu_check.check_graph("fp32", small_decoder(lambda run: (lambda: None, run())), 6)

    def refuses(run):
        raise RuntimeError("no capture")

    with pytest.raises(gpu_check.CheckError, match="not captured: RuntimeError: no capture"):
        gpu_check.check_graph("fp32", small_decoder(refuses), 6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line():
    """Guards against a traceback, or exit code 0, where nothing was checked."""
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "GPU" in done.stderr or "triton" in done.stderr


TILING = Tiling(16, 32, 32, 4, 4, 3)


def test_a_right_product_passes(gpu_check):
    """Guards against a check that nothing can pass."""
    right = lab(gpu_check, int8_matmul=lambda a, b, tiling: reference.int8_matmul(a, b))
    gpu_check.check_product(right, 5, 12, 20, TILING)


def test_an_unwritten_element_is_found(gpu_check):
    """Guards against memory that holds the right answer from the run before."""

    def forgets_one(a, b, tiling):
        out = torch.empty(a.shape[0], b.shape[0], dtype=torch.int32)
        out.view(-1)[1:] = reference.int8_matmul(a, b).view(-1)[1:]
        return out

    empty = torch.empty
    with pytest.raises(gpu_check.CheckError, match=r"1 of 60 sums are wrong at M=5 N=12 K=20"):
        gpu_check.check_product(lab(gpu_check, int8_matmul=forgets_one), 5, 12, 20, TILING)
    assert torch.empty is empty


def test_a_sum_that_is_off_by_one_is_found(gpu_check):
    """Guards against a tolerance where the sums are exact."""

    def off_by_one(a, b, tiling):
        out = reference.int8_matmul(a, b)
        out[-1, -1] += 1
        return out

    with pytest.raises(gpu_check.CheckError):
        gpu_check.check_product(lab(gpu_check, int8_matmul=off_by_one), 5, 12, 20, TILING)


def test_nan_never_passes(gpu_check):
    """Guards against `error > limit`, which is false for NaN."""
    with pytest.raises(gpu_check.CheckError):
        gpu_check.check_close("x", math.nan, 1.0)


def test_a_failing_section_fails_the_run_and_not_the_others(gpu_check, monkeypatch):
    """Guards against losing the bandwidth table to a wrong result, and the failure to the table."""

    def breaks(lab):
        raise gpu_check.CheckError("wrong")

    monkeypatch.setattr(
        gpu_check, "SECTIONS", {"breaks": breaks, "works": lambda lab: ({"a": 1}, ["fine"])}
    )
    results, tables, passed = gpu_check.run_sections(lab(gpu_check), ["breaks", "works"])
    assert not passed
    assert "wrong" in results["breaks"]["failed"]
    assert results["works"]["a"] == 1
    assert "fine" in tables
