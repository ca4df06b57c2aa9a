"""The lists of packages agree, and the checkout holds no outputs and no large files."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# conda-forge calls these differently
CONDA_NAMES = {
    "torch": "pytorch",
    "huggingface-hub": "huggingface_hub",
    "matplotlib": "matplotlib-base",
}


def split(requirement: str) -> tuple[str, str]:
    """ "numba>=0.62" -> ("numba", ">=0.62")."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return match.group(), requirement[match.end() :]


def test_environment_yml_names_the_packages_of_pyproject() -> None:
    """A package added to one list and not the other breaks conda users only."""
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["notebooks"], *extras["test"]]
    expected = {CONDA_NAMES.get(name, name): bound for name, bound in map(split, wanted)}
    expected["python"] = PROJECT["requires-python"]
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    [from_pip] = [entry["pip"] for entry in listed if isinstance(entry, dict)]
    assert from_pip[-1] == "--no-deps -e ."
    names = [entry for entry in listed if isinstance(entry, str) and entry != "pip"]
    assert dict(map(split, [*names, *from_pip[:-1]])) == expected


def test_binder_gets_what_the_notebooks_need() -> None:
    """Binder reads .binder alone: a package added only to environment.yml is missing there."""
    needed = {*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["notebooks"]}
    expected = {CONDA_NAMES.get(name, name): bound for name, bound in map(split, needed)}
    expected["python"] = PROJECT["requires-python"]
    listed = yaml.safe_load((ROOT / ".binder" / "environment.yml").read_text())["dependencies"]
    assert dict(map(split, [entry for entry in listed if entry != "pip"])) == expected


@pytest.mark.parametrize(
    "name", [".ci/run", ".binder/postBuild", ".binder/start", ".devcontainer/setup.sh"]
)
def test_scripts_are_sound_and_may_be_run(name: str) -> None:
    script = ROOT / name
    assert os.access(script, os.X_OK) and script.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_development_container_runs_its_script() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    command = container["postCreateCommand"].split()
    assert command[0] == "bash" and (ROOT / command[1]).is_file()


def test_constraints_pin_every_dependency_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pinned["torch"] == "2.13.0"
    normal = {re.sub(r"[-_.]+", "-", name).lower() for name in pinned}
    extras = PROJECT["optional-dependencies"]
    for requirement in [*PROJECT["dependencies"], *extras["notebooks"], *extras["test"]]:
        assert split(requirement)[0] in normal, requirement
    assert "triton" not in normal  # it would fight the one that a CUDA build of torch brings


def test_package_list_is_complete() -> None:
    """setuptools ships only the packages that are named."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "quasar_lab").rglob("__init__.py")
    }
    assert found | {"quasar_lab.data"} == set(named)


def test_import_and_help_do_not_load_torch() -> None:
    """The command line must answer at once."""
    script = (
        "import sys, quasar_lab, quasar_lab.cli\n"
        "try: quasar_lab.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_every_public_name_can_be_imported() -> None:
    import quasar_lab

    for name in quasar_lab.__all__:
        assert getattr(quasar_lab, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        quasar_lab.nothing  # noqa: B018
