"""report.html: one file with everything in it, that needs no network."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from megatron_p3o.study.figures import Drawing
from megatron_p3o.study.tables import Table

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff;
       max-width: 1240px; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0.2rem; } h2 { margin-top: 2.4rem; }
figure { margin: 1.6rem 0; } figcaption { font-weight: 600; margin-bottom: 0.3rem; }
img { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid #ddd; text-align: right;
         white-space: nowrap; font-variant-numeric: tabular-nums; }
th { border-bottom: 2px solid #888; } th:first-child, td:first-child { text-align: left; }
td.long { white-space: normal; min-width: 24rem; text-align: left; }
.mark { color: #8a3b00; font-weight: 600; }
.banner { background: #fff3d6; border-left: 4px solid #E69F00; padding: 0.5rem 1rem; }
.note { color: #444; font-size: 14px; max-width: 60rem; }
"""
# Longer cells are wrapped.
_LONG = 60
# Words of the state column that must be seen.
_MARKED = ("INCOMPLETE", "FAILED", "NON-FINITE", "not started")


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What a report says, before it is written in HTML or Markdown."""

    title: str
    banners: Sequence[str]
    """What must be known before anything else is read."""
    introduction: Sequence[str]
    tables: Sequence[Table]
    notes: Sequence[str]


def to_html(page: Page, drawings: Sequence[Drawing]) -> str:
    parts = [
        f"<h1>{escape(page.title)}</h1>",
        *(f'<p class="banner">{escape(text)}</p>' for text in page.banners),
        *(f"<p>{escape(text)}</p>" for text in page.introduction),
        *map(_table, page.tables[:1]),
        "<h2>Figures</h2>",
        '<p class="note">Bold lines are averaged over the window, then over the runs that have the '
        "step; bands are the least and greatest of these runs; thin lines are step by step. A line "
        "is dotted where some of its runs have ended; a cross is the end of a run that is not "
        "complete.</p>",
        *map(_figure, drawings),
        *map(_table, page.tables[1:]),
    ]
    if page.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in page.notes)
        parts.append(f"<h2>Notes</h2><ul>{items}</ul>")
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(page.title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def to_markdown(page: Page) -> str:
    parts = [
        f"# {page.title}\n",
        *(f"**{text}**\n" for text in page.banners),
        *(f"{text}\n" for text in page.introduction),
        *(table.to_markdown() for table in page.tables),
    ]
    if page.notes:
        parts.append("## Notes\n")
        parts.append("".join(f"- {note}\n" for note in page.notes))
    return "\n".join(parts)


def _figure(drawing: Drawing) -> str:
    data = base64.b64encode(drawing.png).decode("ascii")
    title = escape(drawing.title)
    return (
        f"<figure><figcaption>{title}</figcaption>"
        f'<img alt="{title}" src="data:image/png;base64,{data}"></figure>'
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f"<h2>{escape(table.title)}</h2>{note}"
        f'<div class="scroll"><table><tr>{head}</tr>\n{rows}</table></div>'
    )


def _cell(text: str) -> str:
    classes = [
        name
        for name, applies in (("long", len(text) > _LONG), ("mark", text in _MARKED))
        if applies
    ]
    attribute = f' class="{" ".join(classes)}"' if classes else ""
    return f"<td{attribute}>{escape(text)}</td>"
