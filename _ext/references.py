"""Label and sort each entry of the list of references as the text cites it.

Sphinx's own styles label the list with shorthands such as ``[ALTdJ+23]``, which no page uses.
Here the template of a citation also makes the label, such as ``Ainslie et al., 2023``.
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
    """Return the text that ``{cite}`` prints in brackets for an entry: author and year."""
    author = CITATION.person.author_or_editor_or_title(full=False)
    parts = join(sep=CITATION.author_year_sep)[author, year]
    return parts.format_data({"entry": entry, "style": CITATION}).render(Backend())


class Labels(BaseLabelStyle):
    """Label entries by author and year; Sphinx warns if two labels are the same."""

    def format_labels(self, sorted_entries):
        """Yield the label of each entry."""
        return map(label, sorted_entries)


class Sorting(BaseSortingStyle):
    """Sort by label, as a reader looks it up, without regard to accents and capitals."""

    def sorting_key(self, entry) -> str:
        """Return the label in small letters without accents."""
        letters = unicodedata.normalize("NFD", label(entry).casefold())
        return "".join(c for c in letters if not unicodedata.combining(c))


class AsCited(Style):
    """Print author, title, place and year; arXiv identifiers, DOIs and addresses are links."""

    default_label_style = Labels
    default_sorting_style = Sorting


def setup(app):
    """Register the style."""
    register_plugin("pybtex.style.formatting", NAME, AsCited)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
