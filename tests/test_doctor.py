"""The doctor: true on this machine, useful on a broken one, and readable by a program."""

import json

import pytest

from quasar_lab import cli, doctor, doctor_checks
from quasar_lab.course import LESSONS
from quasar_lab.doctor_checks import Finding


@pytest.fixture(scope="module")
def findings() -> list[Finding]:
    return doctor.examine()


def named(findings: list[Finding], name: str) -> Finding:
    [finding] = [each for each in findings if each.name == name]
    return finding


def test_every_section_has_its_findings(findings) -> None:
    import torch

    from quasar_lab import available_backends
    from quasar_lab.loading import PRESETS

    sections = {each.section for each in findings}
    assert sections == {"machine", "packages", "INT8 backends", "models", "notebooks"}
    for name in ("Python", "threads", "AVX2 / AVX-512 / VNNI", "GPU", "Triton", "browser", "disk"):
        assert named(findings, name).section == "machine"
    assert {each.state for each in findings} <= set(doctor.SIGNS)
    assert torch.__version__ in named(findings, "core").detail
    states = {each.name: each.state for each in findings if each.section == "INT8 backends"}
    assert states == {
        name: "ok" if answer == "ok" else "absent" for name, answer in available_backends().items()
    }
    assert [each.name for each in findings if each.section == "models"] == list(PRESETS)
    assert sum(each.section == "notebooks" for each in findings) == len(LESSONS)


def test_what_is_missing_has_a_remedy(findings) -> None:
    """And so has what is absent: it says what to install, or that nothing wants it."""
    for each in findings:
        if each.state != "ok" and each.section not in ("notebooks", "INT8 backends"):
            assert each.remedy, each


def test_a_check_that_crashes_is_a_finding(monkeypatch) -> None:
    """A broken torch must not break the command that says that torch is broken."""

    def broken():
        raise ImportError("libtorch.so:\nno such file")

    monkeypatch.setattr(doctor, "CHECKS", {"torch": broken})
    found = doctor.examine()
    assert found[0].state == "missing" and "libtorch.so: no such file" in found[0].detail
    assert all(each.state == "missing" and "needs torch" in each.detail for each in found[1:])
    assert doctor.as_json(found)["works"] is False
    assert "✗ torch" in doctor.as_text(found)


def test_a_lacking_package_names_its_extra(monkeypatch) -> None:
    installed = doctor_checks._installed
    monkeypatch.setattr(
        doctor_checks, "_installed", lambda r: r.name != "jupyterlab" and installed(r)
    )
    found = {each.name: each for each in doctor_checks._packages()}
    assert found["core"].state == "ok"
    assert found["notebooks"].state == "missing" and "jupyterlab>=" in found["notebooks"].detail
    assert "'.[notebooks]'" in found["notebooks"].remedy


def test_an_empty_cache_says_that_the_model_will_be_fetched(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("QUASAR_LAB_CACHE", str(tmp_path / "none" / "yet"))
    monkeypatch.setattr(
        doctor, "CHECKS", {"models": doctor_checks._models, "disk": doctor_checks._disk}
    )
    found = doctor.examine()
    assert named(found, "smollm2-135m").remedy == "quasar-lab fetch smollm2-135m"
    assert str(tmp_path) in named(found, "disk").detail
    assert "fetches the default model first" in found[-1].detail
    assert not (tmp_path / "none").exists()  # the doctor changes nothing


def test_threads_that_are_held_back_are_told(monkeypatch) -> None:
    """A measurement on one of eight cores is the commonest wrong figure."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(doctor_checks.os, "cpu_count", lambda: 8)
    found = {each.name: each for each in doctor_checks._threads()}
    assert found["threads"].state == "absent" and "OMP_NUM_THREADS=1" in found["threads"].remedy


def test_no_browser_is_no_fault(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    [found] = doctor_checks._browser()
    assert found.state == "absent" and "chromium" in found.remedy


def test_command_prints_text_or_json(findings, monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert cli.main(["doctor"]) == 0
    assert "INT8 backends" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["findings"]) == len(findings) and isinstance(data["works"], bool)
    assert set(data["findings"][0]) == {"section", "name", "state", "detail", "remedy"}
