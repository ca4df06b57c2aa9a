"""One page of the site: from notebook or Markdown to HTML that needs no network."""

import html
import json
import os
import re
import uuid
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import jinja2
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"


@dataclass(frozen=True, slots=True)
class Page:
    """source: a notebook or a Markdown file; target: its place in the site."""

    source: Path
    target: str
    title: str
    listed: bool = True


def notebook_html(notebook: Any) -> str:
    """The cells as HTML, outputs included.

    Raises ValueError for a widget without a stand-in, and for an output that is a bare address.
    """
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = with_mathml(cell.source)
        elif cell.cell_type == "code":
            cell.outputs = [_output(each) for each in _static(cell.outputs)]
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True,
                            exclude_output_prompt=True)  # fmt: skip
    return exporter.from_notebook_node(notebook)[0]


def document_html(text: str) -> str:
    return f'<article class="document">{markdown2html(with_mathml(text))}</article>'


def _static(outputs: list[Any]) -> list[Any]:
    """Without live widgets and progress bars; the widgets' own pictures stay."""
    views = [each["data"] for each in outputs if WIDGET in each.get("data", {})]
    shown = [each for each in outputs if WIDGET not in each.get("data", {})]
    panels = [view for view in views if "%|" not in view.get("text/plain", "")]
    if panels and not any("text/html" in each.get("data", {}) for each in shown):
        raise ValueError(f"a widget puts out no picture for a page without a kernel: {panels}")
    for each in shown:
        text = each.get("data", {}).get("text/plain", "")
        if re.fullmatch(r"<.* at 0x[0-9a-f]+>", text) and len(each["data"]) == 1:
            raise ValueError(f"a cell ends with an object that says nothing to a reader: {text}")
    return [each for each in shown if each.get("name") != "stderr"]


def _output(output: Any) -> Any:
    """A plotly figure becomes a live one; formulas in Markdown become MathML."""
    data = output.get("data", {})
    if PLOTLY in data:
        figure = data.pop(PLOTLY)
        data["text/html"] = _plotly_html(figure)
    elif "text/markdown" in data:
        data["text/markdown"] = with_mathml(data["text/markdown"])
    return output


def _plotly_html(figure: dict[str, Any]) -> str:
    name = f"figure-{uuid.uuid4().hex[:12]}"
    layout = figure.get("layout", {})
    parts = [json.dumps(figure.get(key)).replace("</", "<\\/") for key in ("data", "layout")]
    label = html.escape(layout.get("meta", {}).get("alt", "interactive figure"))
    return (
        f'<div id="{name}" class="plotly-figure" role="img" aria-label="{label}"></div>'
        f'<script>document.addEventListener("DOMContentLoaded", () => Plotly.newPlot("{name}", '
        f'{parts[0]}, {parts[1]}, {{"responsive": true, "displaylogo": false}}));</script>'
    )


# code comes first: a dollar sign in it is no formula
_MATH = re.compile(
    r"(?P<code>```.*?```|`[^`\n]+`)"
    r"|\$\$(?P<block>.+?)\$\$"
    r"|(?<![\w$\\])\$(?! )(?P<inline>[^$\n]+?)(?<! )\$(?!\w)",
    re.DOTALL,
)


def with_mathml(text: str) -> str:
    """Formulas between dollar signs as MathML, which browsers draw without a script."""

    def mathml(found: re.Match[str]) -> str:
        if found["code"]:
            return found["code"]
        if found["block"]:
            return convert(" ".join(found["block"].split()), display="block").replace("\n", " ")
        return convert(found["inline"]).replace("\n", " ")

    return _MATH.sub(mathml, text)


@cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    return jinja2.Environment(loader=loader, autoescape=True).get_template("page.html")


def write_page(site: Path, page: Page, body: str, pages: list[Page]) -> None:
    """Put a body into the frame of the site, with its neighbours and its links set right."""
    listed = [each for each in pages if each.listed]
    place = listed.index(page) if page in listed else None
    base = os.path.relpath(".", Path(page.target).parent)
    targets = {each.source.resolve(): each.target for each in pages}

    def right(found: re.Match[str]) -> str:
        link = html.unescape(found[1])
        if urlsplit(link).scheme or link.startswith("#"):
            return found[0]
        path, _, anchor = link.partition("#")
        target = targets.get((page.source.parent / unquote(path)).resolve())
        if target is None:
            return found[0]
        link = os.path.relpath(target, Path(page.target).parent) + (f"#{anchor}" if anchor else "")
        return f'href="{html.escape(link)}"'

    text = _template().render(
        title=page.title, body=re.sub(r'href="([^"]+)"', right, body), base=base, pages=listed,
        current=page.target, plotly="plotly-figure" in body,
        before=listed[place - 1] if place else None,
        after=listed[place + 1] if place is not None and place + 1 < len(listed) else None,
    )  # fmt: skip
    file = site / page.target
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


class _Reader(HTMLParser):
    """Collects what a page names: its anchors, its links, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.anchors |= {value for key in ("id", "name") if (value := found.get(key))}
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        loads = found.get("src") or (found.get("href") if tag == "link" else None)
        if loads and not loads.startswith("data:"):
            self.loads.append(loads)


def check_links(site: Path) -> list[str]:
    """One line for each link, anchor or picture that leads nowhere, or is loaded from elsewhere."""
    read: dict[Path, _Reader] = {}
    for path in sorted(site.rglob("*.html")):
        read[path] = _Reader()
        read[path].feed(path.read_text())
    faults = []
    for path, page in read.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                if link in page.loads:
                    faults.append(f"{path.relative_to(site)} loads {link} from the network")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                faults.append(f"{path.relative_to(site)}: {link} is not there")
            elif (
                parts.fragment
                and target in read
                and not (
                    # nbconvert escapes the ids of its headings; browsers look for both
                    {parts.fragment, unquote(parts.fragment)} & read[target].anchors
                )
            ):
                faults.append(f"{path.relative_to(site)}: {link} names no heading")
    return faults
