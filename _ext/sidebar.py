"""Fold the table of contents in the sidebar into five groups, one of which is open.

The captions of ``_toc.yml`` name the groups. "Audits: verdicts" and "Audits: five papers" make one
group with two headings. The numbered parts and the pages of `FIRST` make the group of chapters.
"""

from __future__ import annotations

import re

CHAPTERS = "Chapters"
CAPTION = re.compile(
    r'<p aria-level="2" class="caption" role="heading"><span class="caption-text">(.*?)</span></p>'
    r"\s*(<ul.*?</ul>)",
    re.S,
)
FIRST = "Before you start"  # its pages belong to the group of chapters, too


def fold(contents: str) -> str:
    """Return the sidebar's contents with each group of captions in a folding box."""
    groups: dict[str, list[str]] = {}
    for caption, pages in CAPTION.findall(contents):
        group, _, heading = caption.partition(": ")
        if group == FIRST or group.startswith("Part "):
            group, heading = CHAPTERS, caption
        title = f'<p class="caption">{heading[:1].upper()}{heading[1:]}</p>\n' if heading else ""
        groups.setdefault(group, []).append(title + pages)
    here = next((g for g, lists in groups.items() if any("current" in x for x in lists)), CHAPTERS)
    boxes = (
        f'<details class="da-group"{" open" * (group == here)}><summary>{group}</summary>\n'
        + "\n".join(lists)
        + "\n</details>"
        for group, lists in groups.items()
    )
    return "\n".join(boxes)


def _fold_sidebar(app, pagename, templatename, context, doctree):
    make = context.get("generate_toctree_html")  # the theme's
    if make:
        context["generate_toctree_html"] = lambda **options: fold(str(make(**options)))


def setup(app):
    """Register the folded sidebar, after the theme's own."""
    app.connect("html-page-context", _fold_sidebar, priority=940)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
