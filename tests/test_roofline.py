"""What notebook 03 is made of: the roofline's numbers, the kernels' source, its pictures."""

import pytest
import torch
from matplotlib.figure import Figure

from quasar_lab import UserError, roofline
from quasar_lab.int8_gemm import int8_matmul, quantize_activation, quantize_weight, triton_reading
from quasar_lab.plots import gemm as plots_gemm


def test_break_even_is_where_reading_and_arithmetic_take_equally_long() -> None:
    rows = roofline.break_even_rows(4e11, 2e10, 1)
    assert rows == 10 and 2 * rows / 4e11 == 1 / 2e10
    assert roofline.break_even_rows(2e11, 2e10, 2) == rows  # half the rate, twice the bytes
    with pytest.raises(UserError, match="must be positive"):
        roofline.break_even_rows(4e11, 0, 1)


@pytest.fixture(scope="module")
def times():
    # large enough that few copies are made, small enough that the products take no time
    return roofline.time_linears(512, 4096, [1, 2, 3], row_by_row_up_to=2, repeats=2)


def test_times_hold_every_path_and_count_operations(times) -> None:
    assert set(times["path"]) == set(roofline.FORMATS)
    assert list(times.loc[times["path"] == roofline.ROW_BY_ROW_PATH, "M"]) == [1, 2]
    operations = times["operations_per_second"] * times["seconds"]
    assert operations.tolist() == pytest.approx((2 * times["M"] * 512 * 4096).tolist())


def test_full_precision_is_represented_by_its_fastest_path(times) -> None:
    """Guards against comparing INT8 with a slow path, or with INT8 itself."""
    fastest = roofline.fastest_full_precision(times)
    full = times[times["format"] != "INT8"]
    assert fastest["seconds"].to_dict() == full.groupby("M")["seconds"].min().to_dict()


def test_times_refuse_what_cannot_be_measured() -> None:
    with pytest.raises(UserError, match="must be positive"):
        roofline.time_linears(64, 64, [0])


def test_peak_rates_are_of_each_format() -> None:
    peaks = roofline.peak_rates(repeats=1)
    assert set(peaks) == {"INT8", "bf16", "fp32"} and min(peaks.values()) > 0


def test_kernel_source_is_the_functions_text_with_its_decorators() -> None:
    text = triton_reading.kernel_source("quantize_kernel")
    assert text.startswith("@triton.jit") and "def quantize_kernel(" in text
    assert text.count("def ") == 1
    with pytest.raises(UserError, match="there is no kernel 'nothing'"):
        triton_reading.kernel_source("nothing")


@pytest.mark.skipif(not triton_reading.has_triton(), reason="triton is not installed")
def test_interpreted_kernels_equal_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((3, 50), (20, 50)))
    qweight, scale = quantize_weight(weight)
    qx, sx = quantize_activation(x)
    expected = int8_matmul(qx, qweight, backend="reference").float() * sx * scale
    assert torch.equal(triton_reading.run_interpreted(x, qweight, scale), expected)


def test_without_triton_there_is_one_clear_line(monkeypatch) -> None:
    monkeypatch.setattr(triton_reading, "has_triton", lambda: False)
    with pytest.raises(UserError, match="triton is not installed"):
        triton_reading.run_interpreted(
            torch.ones(1, 1), torch.ones(1, 1, dtype=torch.int8), torch.ones(1)
        )


def test_pictures_of_measured_times(times, tmp_path) -> None:
    points = roofline.fastest_of_each_format(times)
    assert len(points) == 3 * 3 and set(points["format"]) == {"INT8", "bf16", "fp32"}
    figures = [
        plots_gemm.plot_rows(times, 512 * 4096, 1e10, paths=[roofline.INT8_PATH, "fp32 linear"]),
        plots_gemm.plot_roofline(points, {"INT8": 2e11, "bf16": 1e11, "fp32": 1e11}, 1e10),
        plots_gemm.plot_tile(3),
    ]
    for figure in figures:
        assert isinstance(figure, Figure)
        figure.savefig(tmp_path / "figure.png")
