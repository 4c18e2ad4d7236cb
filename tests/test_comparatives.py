"""Comparatives that pages use of experiments are found and listed."""

import comparatives

PAGE = """# A page

Theory is better than practice.

## A proof

Ridge is ahead.

```{code-cell} ipython3
print("softmax is better")
```

## The experiment

Two arms are trained. Softmax is *ahead* of linear attention by
more than a point. Nothing else was varied.

```{code-cell} ipython3
results_table("small_model", "answers", predicted={"softmax": "better"})
## a comment, which is no heading
```

:::{admonition} Note
:class: better
A window cannot see it.
:::

$$
\\text{better}
$$
"""


def test_sentences_with_comparatives_in_sections_with_results_are_found():
    assert list(comparatives.comparatives(PAGE)) == [
        (
            15,
            "Softmax is *ahead* of linear attention by more than a point.",
            ["ahead", "more than"],
        ),
        (25, "A window cannot see it.", ["cannot"]),
    ]


def test_the_command_prints_lines_or_numbers(tmp_path, capsys):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    assert comparatives.main([str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[::2] == [
        "page.md: 2",
        "  25: [cannot] A window cannot see it.",
    ]
    comparatives.main(["--count", str(path)])
    assert capsys.readouterr().out == "page.md: 2\n"


def test_every_page_with_recorded_experiments_is_read(capsys):
    comparatives.main(["--count"])
    pages = {line.partition(":")[0] for line in capsys.readouterr().out.splitlines()}
    assert {"15_delta_rule.md", "16_what_to_keep.md", "17_side_by_side.md"} <= pages
