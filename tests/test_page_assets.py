"""Tests of the book's extensions on small examples: styles, marks and cells."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from docutils import nodes

import content_visibility
import katex_prerender
import labels
import page_assets
import stylesheet


@pytest.mark.parametrize(
    ("css", "kept"),
    [
        ("a { color: red } /* note */ .no { b: c }", "a{color: red}"),
        (".yes, .no:hover, .yes .no { b: c }", ".yes{b: c}"),
        (".yes:not(.no) { b: c }", ".yes:not(.no){b: c}"),
        ("@media print { .no { b: c } .yes { d: e } }", "@media print{.yes{d: e}}"),
        ("@media print { .no { b: c } }", ""),
        (":root { --a: 1; --b: 'x;}'; --c: var(--a) } p { d: var(--c) }",
         ":root{--a: 1;--c: var(--a)}p{d: var(--c)}"),
        ("@font-face { font-family: 'Font Awesome 6 Free' }", ""),
        (".fa-yes::before { content: 'x' }", ""),
    ],
)  # fmt: skip
def test_prune_keeps_what_can_apply(css, kept):
    assert stylesheet.prune(css, {"yes", "fa-yes"}) == kept


def test_plain_words_of_code_are_no_elements():
    code = '<span class="n">x</span><span class="w"> </span><span class="o">=</span>'
    signature = '<span class="n"><span class="pre">x</span></span>'
    name = f'<dt class="sig sig-object py">{signature}</dt>'
    context = {"body": code + signature + name}
    page_assets._lighten(SimpleNamespace(), "page", "page.html", context, None)
    plain = '<dt class="sig sig-object py">x</dt>'
    assert context["body"] == f'x <span class="o">=</span>{signature}{plain}'


def test_contents_of_the_api_name_functions_and_classes_alone():
    marked = '<code class="docutils"><span class="pre">{}</span></code>'

    def entry(level, name, more="", code=marked):
        link = f'<a class="nav-link" href="#derived_attention.x.{name}">{code.format(name)}</a>'
        return f'<li class="toc-h{level} entry">{link}{more}</li>'

    methods = f'<ul class="nav">\n{entry(4, "A.f()")}\n{entry(4, "A.g()")}\n</ul>'
    found = page_assets.shorten(f"<ul>{entry(3, 'A', methods)}{entry(3, 'b()')}</ul>")
    plain = "".join(entry(3, name, code="<code>{}</code>") for name in ("A", "b()"))
    assert found == f"<ul>{plain}</ul>"
    chapter = '<ul class="nav"><li class="toc-h4"><a href="#a-heading">A heading</a></li></ul>'
    assert page_assets.shorten(chapter) == chapter


def test_entries_of_the_api_say_how_tall_they_are():
    method = '<dl class="py method">x</dl>'
    inner = f'<dl class="py class"><dd>four{method}</dd></dl><dl class="no">y</dl>'
    found = content_visibility.say_heights(f"<section><section>{inner}</section></section>")
    assert found.count("--wide") == 2 and '<dl class="py class" style="--wide' in found
    assert '<dl class="py method">' in found and '<dl class="no">' in found


def test_a_section_has_room_for_what_its_entries_say_and_the_gaps_below_them():
    entry = '<dl class="py function"><dt class="sig x">name</dt><dd><p>Text.</p></dd></dl>'
    found = content_visibility.say_heights(f"<section><section>{3 * entry}</section></section>")
    section, *entries = map(int, re.findall(r"--wide:(\d+)px", found))
    assert len(entries) == 3 and section == pytest.approx(sum(entries) + 3 * 48, abs=2)


def test_large_sliders_have_their_steps_in_a_file(tmp_path):
    small, large = (f"(x=>{{x&&{'9' * n}}})" for n in (10, 9000))
    body = "".join(f"<div><script>{x}</script></div>" for x in (small, large))
    found = page_assets.put_aside(body, tmp_path, "../_static")
    (file,) = (tmp_path / page_assets.SLIDERS).iterdir()
    assert file.read_text("utf8") == large
    place = f'<script type="text/plain" data-src="../_static/sliders/{file.name}"></script>'
    assert found == body.replace(f"<script>{large}</script>", place)


def test_a_page_names_the_faces_of_its_formulas():
    def faces(body):
        context = {"body": body}
        katex_prerender._finish_page(SimpleNamespace(), "page", "page.html", context, None)
        return context["da_faces"]

    assert faces("<p>katex mathbb</p>") == ""
    assert faces('<span class="katex"><span class="mord mathbb">R</span></span>') == "AMS Main"
    assert faces('<span class="mopen delimsizing size3">(</span>') == "Size3"


def test_sections_say_how_tall_they_are():
    inner = "<section id='c'><p>four</p></section><pre>a\nb</pre><details><pre>c</pre></details>"
    page = f"<section id='a'><h1>x</h1><section id='b'>{inner}</section></section>"
    said = content_visibility.say_heights(page)
    wide, narrow = (
        round(4 * text + 2 * line + folded + heading)
        for text, line, *_, folded, heading in content_visibility.PIXELS.values()
    )
    style = f' style="--wide:{wide}px;--narrow:{narrow}px"'
    assert said == page.replace("<section id='b'>", f"<section id='b'{style}>")


def test_gather_moves_addresses(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "base.css").write_text("p { background: url(x.png) }")
    (tmp_path / "a" / "top.css").write_text('@import "../base.css"; q { src: url("f/y.woff2") }')
    css = stylesheet.gather([tmp_path / "a" / "top.css"], tmp_path)
    assert "url(x.png)" in css and "url(a/f/y.woff2)" in css and "@import" not in css


def test_marks_are_drawn():
    drawn = page_assets.draw_marks("<p>\u270d\ufe0f Prove it.</p>")
    assert "\u270d" not in drawn and "\ufe0f" not in drawn and 'aria-label="by hand"' in drawn


CHECK = '<div class="da-claim" id="claim-{}-1"></div>'


@pytest.mark.parametrize(
    ("code", "html", "figure", "label"),
    [
        ("import torch\n\nx = 1", "", None, "set-up"),
        ("def f(): pass\nclass G: pass\nx = 1", "", None, "f, G"),
        ("a = b = 1\nc, d = 2, 3\ne = 4", "", None, "a, b, c and 2 more"),
        ("%time f()", "", None, ""),
        ("x", CHECK.format("000.eq3") + CHECK.format("book"), None, "checks of 000.eq3"),
        ("x", CHECK.format("000.eq3"), None, "check of 000.eq3"),
        ("x", CHECK.format("book"), None, "a check"),
        ("def f(): pass", "<svg></svg>", "fig-a", "figure 5.1"),
        ("x", '<div class="da-slider"></div>', "fig-a", "interactive figure 5.1"),
        ("x", '<div class="da-slider"></div>', None, "the interactive figure"),
        ("def f(): pass", "<table></table>", None, "the table below"),
    ],
)
def test_code_label(code, html, figure, label):
    cell = nodes.container("", nodes.literal_block("", code))
    raw = nodes.raw("", html, format="html")
    cell += nodes.figure("", raw, ids=[figure]) if figure else raw
    env = SimpleNamespace(toc_fignumbers={"book/05": {"figure": {"fig-a": (5, 1)}}})
    assert labels.code_label(SimpleNamespace(env=env), "book/05", cell) == label
