"""The picture of README.md and the front page shows the recorded runs."""

import picture


def test_the_picture_shows_the_recorded_runs():
    assert picture.PATH.read_text("utf8") == picture.draw(), "run `make notebooks`"
    assert "assets/recall.svg" in (picture.PATH.parents[1] / "README.md").read_text("utf8")
