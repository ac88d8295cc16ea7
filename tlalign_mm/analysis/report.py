"""A report of one self-contained HTML file."""

import base64
import html
import io
import os
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


class Section(NamedTuple):
    """A part of a report.

    Attributes:
        title: Heading.
        text: What a reader needs to understand the figure; plain text, a paragraph a line.
        figure: The picture, or None.
        table: Rows of cells, the first row being the head, or None.
    """

    title: str
    text: str
    figure: Figure | None = None
    table: list[list[str]] | None = None


def write_report(path: str | Path, title: str, sections: list[Section]) -> Path:
    """Write the sections as one HTML file, whole or not at all; closes their figures."""
    path = Path(path)
    body = "\n".join(_render(section) for section in sections)
    template = Template(files("tlalign_mm.analysis").joinpath("report.html").read_text())
    partial = path.with_name(path.name + ".partial")
    partial.write_text(template.substitute(title=html.escape(title), body=body))
    os.replace(partial, path)
    return path


def _render(section: Section) -> str:
    paragraphs = [f"<p>{html.escape(line)}</p>" for line in section.text.splitlines()]
    parts = [f"<h2>{html.escape(section.title)}</h2>", *paragraphs]
    if section.table:
        parts.append(_render_table(section.table))
    if section.figure:
        parts.append(
            f'<img alt="{html.escape(section.title)}" src="{_to_data_uri(section.figure)}">'
        )
    return "<section>" + "\n".join(parts) + "</section>"


def _render_table(rows: list[list[str]]) -> str:
    head, *body = rows
    cells = ["<tr>" + "".join(f"<th>{html.escape(c)}</th>" for c in head) + "</tr>"]
    cells += ["<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in body]
    return "<table>" + "".join(cells) + "</table>"


def _to_data_uri(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
