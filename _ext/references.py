"""The list of references: each entry is labelled and sorted as the text cites it.

Sphinx's own styles label the list with shorthands such as ``[ALTdJ+23]``, which no page has.
Here the label is made by the very template of a citation, ``Ainslie et al., 2023``.
"""

from __future__ import annotations

import unicodedata

from pybtex.backends.plaintext import Backend
from pybtex.plugin import register_plugin
from pybtex.style.formatting.unsrt import Style
from pybtex.style.labels import BaseLabelStyle
from pybtex.style.sorting import BaseSortingStyle
from sphinxcontrib.bibtex.style.referencing.basic_author_year import (
    BasicAuthorYearParentheticalReferenceStyle,
)
from sphinxcontrib.bibtex.style.template import join, year

NAME = "as_cited"  # the `bibtex_default_style` of _config.yml
CITATION = BasicAuthorYearParentheticalReferenceStyle()


def label(entry) -> str:
    """Return what ``{cite}`` shows of an entry between its brackets: author and year."""
    author = CITATION.person.author_or_editor_or_title(full=False)
    parts = join(sep=CITATION.author_year_sep)[author, year]
    return parts.format_data({"entry": entry, "style": CITATION}).render(Backend())


class Labels(BaseLabelStyle):
    """Labels by author and year; Sphinx warns where two are the same."""

    def format_labels(self, sorted_entries):
        """Yield the label of each entry."""
        return map(label, sorted_entries)


class Sorting(BaseSortingStyle):
    """By label, as a reader looks it up: accents and capitals do not count."""

    def sorting_key(self, entry) -> str:
        """Return the label in plain small letters."""
        letters = unicodedata.normalize("NFD", label(entry).casefold())
        return "".join(c for c in letters if not unicodedata.combining(c))


class AsCited(Style):
    """Author, title, place and year, with arXiv identifiers, DOIs and addresses as links."""

    default_label_style = Labels
    default_sorting_style = Sorting


def setup(app):
    """Register the style."""
    register_plugin("pybtex.style.formatting", NAME, AsCited)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
