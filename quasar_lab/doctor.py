"""What this machine can do with quasar-lab, and what to install for the rest.

A check that crashes becomes a finding itself: the doctor is called when something is broken.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from quasar_lab.course import LESSONS
from quasar_lab.doctor_checks import CHECKS, MACHINE, Finding

SIGNS = {"ok": "✓", "absent": "–", "missing": "✗"}


def examine() -> list[Finding]:
    """Look at everything; the notebooks are judged by what was found before them."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            findings += check()
        except Exception as error:  # a broken installation fails in any way
            detail = f"{type(error).__name__}: {' '.join(str(error).split())}"
            remedy = "install again: python -m pip install -c constraints.txt -e '.[notebooks]'"
            findings.append(Finding(MACHINE, name, "missing", detail[:300], remedy))
    return findings + list(_notebooks(findings))


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """{"works": nothing is missing, "findings": [...]} of plain JSON values."""
    rows = [asdict(finding) for finding in findings]
    return {"works": all(row["state"] != "missing" for row in rows), "findings": rows}


def as_text(findings: Iterable[Finding]) -> str:
    """One line a finding, by section; what to do stands below it."""
    lines: list[str] = []
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section] if lines else [section]
        lines.append(f"  {SIGNS[finding.state]} {finding.name:27} {finding.detail}")
        if finding.remedy:
            lines.append(f"      → {finding.remedy}")
    lines += ["", f"{SIGNS['ok']} works   {SIGNS['absent']} not here, the lab does without   "
                  f"{SIGNS['missing']} will not work"]  # fmt: skip
    return "\n".join(lines)


def _notebooks(findings: Iterable[Finding]) -> Iterator[Finding]:
    """What stops a notebook, what it will fetch, and what it will do without."""
    from quasar_lab.checkpoints.names import DEFAULT_MODEL

    found = {finding.name: finding for finding in findings}
    broken = [name for name, finding in found.items() if finding.state == "missing"]
    model = found.get(DEFAULT_MODEL)
    fetches = model is not None and model.state != "ok"
    for lesson in LESSONS:
        without = [
            name for name in lesson.better_with if name in found and found[name].state != "ok"
        ]
        notes = ["will work"]
        if broken:
            notes = [f"needs {', '.join(broken)}"]
        elif fetches:
            notes.append("fetches the default model first")
        if without and not broken:
            notes.append(f"without {' and '.join(without)}, and says so")
        state = "missing" if broken else "ok"
        yield Finding("notebooks", f"{lesson.number} {lesson.title}", state, "; ".join(notes))
