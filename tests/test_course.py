"""Assignments from the pages: they show no solution, and nbgrader marks what students hand in."""

import copy
import csv
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import nbformat
import pytest
import torch
from nbgrader.api import Gradebook
from places import ROOT

import course
from derived_book import grading
from derived_book.exercises import ExerciseError, check_properties
from exercises import SOLUTION, plain, read_exercises

NAMES = [course.assignment(page) for page in course.pages()]
RUN = 8  # two texts do not share 8 words and signs in a row by chance
PROBLEM = (ROOT / "course" / "own_questions.md").read_text("utf8")


@cache
def assignments():
    """Return, by name, exercises and source of every page's assignment, with its open exercises."""
    found = {}
    for page in course.pages():
        path, name = course.BOOK / f"{page}.md", course.assignment(page)
        exercises = sorted(read_exercises(path), key=lambda e: e.open)
        found[name] = exercises, course.source(course.title_of(path), name, exercises, 7)
    return found


def words(text):
    """Return the words and signs of a text."""
    return re.findall(r"\w+|[^\w\s]", text)


def runs(text):
    """Return what stands in a text in a row."""
    found = words(text)
    return {tuple(found[i : i + RUN]) for i in range(len(found) - RUN + 1)}


def text_of(notebook):
    return "\n\n".join(cell.source for cell in notebook.cells)


def title_of(notebook):
    return notebook.cells[0].source.splitlines()[0].removeprefix("# ")


# --- the assignments -----------------------------------------------------------------------------


def test_every_page_with_exercises_has_an_assignment_in_the_order_of_the_book():
    assert NAMES[:4] == ["chapter01", "positions", "chapter02", "chapter03"]
    assert len(NAMES) == len(set(NAMES)) == len(assignments()) >= 19
    assert not any(name.startswith("audit") for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_students_get_no_solution(name):
    exercises, source = assignments()[name]
    students = course.for_students(source)
    nbformat.validate(students)
    text = text_of(students)
    given = runs(text)
    page = next(page for page in course.pages() if course.assignment(page) == name)
    written = (course.BOOK / f"{page}.md").read_text("utf8")
    public = runs(SOLUTION.sub("", written)) | runs(
        "\n".join(x for e in exercises for x in (e.text, e.test, *e.needed))
    )
    solved = [m[3] or m[5] for m in SOLUTION.finditer(written)]
    assert len(solved) == len(exercises)
    for exercise in exercises:
        for solution in (*solved, exercise.solution, exercise.code):
            assert not (runs(solution) & given) - public, exercise.label
        assert exercise.name == "" or f"{exercise.name} = ...\n{course.STUB}" in text
    assert not re.search("BEGIN|END (SOLUTION|HIDDEN|MARK)|check_refuses|Rubric", text)
    lecturers = text_of(source)  # contains what the students' version lacks
    assert not re.search(r"\bSEED\b", text)
    other = course.source(title_of(source), name, exercises, 8)  # for another group
    assert students == course.for_students(other) and (name != "chapter05" or other != source)
    assert all(e.code in lecturers and e.solution in lecturers for e in exercises)
    assert re.search("Rubric|Solution", lecturers)


def test_the_comparison_sees_a_solution():
    exercises, source = assignments()["chapter05"]
    code = runs(next(e.code for e in exercises if e.label == "ex-05-causal"))
    assert code <= runs(text_of(source))
    assert len(code - runs(text_of(course.for_students(source)))) > len(code) / 2


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_what_nbgrader_asks_for(name):
    exercises, source = assignments()[name]
    kinds = [cell.metadata["nbgrader"] for cell in source.cells]
    ids = [kind["grade_id"] for kind in kinds]
    assert len(ids) == len(set(ids)) and all(re.fullmatch(r"[\w-]+", x) for x in ids)
    graded = [cell for cell in source.cells if cell.metadata["nbgrader"]["grade"]]
    total = sum(cell.metadata["nbgrader"]["points"] for cell in graded)
    assert total == sum(sum(course.points(e)) for e in exercises)
    for cell in graded:
        kind = cell.metadata["nbgrader"]
        if cell.cell_type == "code":  # graded by its outcome; students cannot edit it
            assert kind["locked"] and not kind["solution"]
            assert cell.source.count("### BEGIN HIDDEN TESTS") == 1
        else:
            assert kind["solution"] and not kind["locked"]
    checks = sum(cell.cell_type == "code" for cell in graded)
    assert checks == sum(bool(e.name) for e in exercises)


@pytest.mark.parametrize("name", NAMES)
def test_an_assignment_trains_nothing_and_has_the_chapter_s_words(name):
    exercises, source = assignments()[name]
    for exercise in exercises:
        for statement in exercise.needed:
            assert not re.match(r"(run|model)\b|.*\b(train|start|run_grid|fit)\(", statement)
    page = next(page for page in course.pages() if course.assignment(page) == name)
    notebook = nbformat.read(ROOT / "notebooks" / f"{page}.ipynb", as_version=4)
    text = re.sub(r"\[([^\]]*)\]\([^)\s]*\.ipynb[^)]*\)", r"\1", text_of(notebook))  # without links
    theirs = "".join(words(re.sub("^> ?", "", text, flags=re.M).translate(QUOTES)))
    for exercise in exercises:
        if exercise.label != "ex-02-merge":  # contains a theorem with its own number
            assert "".join(words(exercise.text.translate(QUOTES))) in theirs, exercise.label
            assert f"Exercise{exercise.number}(" in theirs


QUOTES = {ord(x): None for x in "“”\"’'‘\\"}


def test_the_weeks_add_up(tmp_path):
    found = course.course()
    course.write_weeks(tmp_path, course.write(7, found, tmp_path))
    rows = list(csv.DictReader(open(tmp_path / "weeks.csv", encoding="utf8")))
    assert [row["assignment"] for row in rows] == NAMES
    assert [int(row["week"]) for row in rows] == list(range(1, len(NAMES) + 1))
    fifth = rows[NAMES.index("chapter05")]
    given = [fifth[x] for x in ("minutes", "points by checks", "points by hand")]
    assert given == ["70", "40", "30"]
    assert "70 minutes, 70 points." in text_of(course.source("", "", found["chapter05"][1], 7))
    assert not any(e.open for _, exercises in found.values() for e in exercises)
    assert sorted(p.stem for p in (tmp_path / "student").iterdir()) == sorted(NAMES)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.ipynb")}
    (tmp_path / "nbgrader" / "gradebook.db").write_text("marks")
    course.write(7, course.course(plan=str(tmp_path / "weeks.csv")), tmp_path)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*.ipynb")}
    assert (tmp_path / "nbgrader" / "gradebook.db").read_text() == "marks"


@pytest.mark.parametrize(("syllabus", "weeks"), [("12", 12), ("6", 5), ("2", 6)])
def test_a_syllabus_makes_an_assignment_of_each_week_s_exercises(syllabus, weeks):
    found = course.course(plan=syllabus)
    assert len(found) == weeks
    for name, (title, exercises) in found.items():
        source = course.source(title, name, exercises, 7)
        given = [cell.metadata["nbgrader"].get("points", 0) for cell in source.cells]
        assert sum(given) == sum(sum(course.points(e)) for e in exercises) > 0
        if len({e.number.partition(".")[0] for e in exercises}) > 1:  # of two chapters
            exec("\n".join(c.source for c in source.cells[2:] if c.cell_type == "code"), {})


def test_a_plan_that_cannot_be_followed_says_what_is_expected(tmp_path):
    with pytest.raises(ValueError, match="EXERCISES is 'all'; expected 12, 6, 2 or a file like"):
        course.course(plan="all")
    plan, head = tmp_path / "plan.csv", "assignment,title,exercises"
    rows = "quiz,Quiz,ex-05-rms\nquiz,Quiz,ex-05-bias"
    for text, problem in (
        (f"{head}\nquiz,Quiz,ex-05-comon", "quiz has .*'ex-05-comon'; expected ex-05-common"),
        (f"{head}\n{rows}", "assignments quiz, quiz; expected each name once"),
        (f"a;b;c\n{rows}", r"assignments \(none\); expected each name once"),
        (f"{head}\nquiz,Übung,", "plan.csv is in another encoding; expected CSV in UTF-8"),
        (f"{head}\n,,ex-05-rms", "has the assignment ''; expected letters"),
        (f"{head}\n../quiz,,ex-05-rms", "has the assignment '../quiz'; expected letters"),
        (f"{head}\nquiz/5,,ex-05-rms", "has the assignment 'quiz/5'; expected letters"),
    ):
        plan.write_text(f"{text}\n", "cp1252")
        with pytest.raises(ValueError, match=problem):
            course.course(plan=str(plan))


def test_a_plan_that_cannot_be_followed_leaves_the_secret_as_it_was(monkeypatch, capsys):
    monkeypatch.setattr(course, "hidden_seed", lambda *_: pytest.fail("the secret was stored"))
    monkeypatch.setattr(course.sys, "argv", ["course.py", "--exercises", "all"])
    assert course.main() == 1 and "EXERCISES is 'all'" in capsys.readouterr().err


def test_a_question_beside_a_check_has_a_cell_and_points():
    exercise = {e.label: e for e in assignments()["chapter05"][0]}["ex-05-rms"]
    task, *_, answer = course._cells(exercise, 7)
    assert course.points(exercise) == (12, 3) and answer.metadata["nbgrader"]["points"] == 3
    assert "- 3 points: Which keys gain weight, compared with softmax attention?" in task.source
    assert course.demands("Is it linear? $x$ is a number.") == ["Is it linear?"]


# --- hidden tests --------------------------------------------------------------------------------


def test_another_seed_gives_other_draws():
    test = "x = np.random.default_rng(3)\ng.manual_seed(4)\ncheck_properties(f, p, tol=1)"
    assert course.other_draws(test, 2) == (
        "x = np.random.default_rng([2, 3])\ng.manual_seed(4 + 2000)\n"
        "check_properties(f, p, tol=1, seed=2)"
    )
    seen = []

    def draws(answer):
        """Numbers are drawn."""
        seen.append(torch.rand(1).item())
        yield "one", True

    for seed in (0, 0, 5):
        check_properties(1, draws, seed=seed)
    assert seen[0] == seen[1] != seen[2]


def graded(exercise, answer, seed=7):
    """Run an exercise's whole check on an answer."""
    world = {}
    parts = [*exercise.needed, exercise.before, answer, course._test(exercise, seed)]
    exec("\n".join(parts), world)


@pytest.mark.parametrize("label", ["ex-05-common", "ex-05-rms", "ex-05-causal"])
def test_hidden_tests_take_the_solution_and_nothing_else(label, capsys):
    exercise = {e.label: e for e in assignments()["chapter05"][0]}[label]
    graded(exercise, exercise.code)
    assert capsys.readouterr().out == "Correct.\nCorrect.\n"
    with pytest.raises(AssertionError, match="there is no answer"):
        graded(exercise, f"{exercise.name} = ...")
    with pytest.raises(AssertionError, match="there is no answer"):
        graded(exercise, "")
    with pytest.raises(ExerciseError, match=exercise.mistakes[0].message):
        graded(exercise, exercise.mistakes[0].code)
    # This answer is right for the draws that students see, and for no others.
    knows = "import torch\nright, first = {0}, torch.Generator().manual_seed(0).initial_seed()\n"
    knows += "def {0}(*x):\n    return right(*x) * (torch.initial_seed() == first)"
    with pytest.raises(ExerciseError):
        graded(exercise, f"{exercise.code}\n{knows.format(exercise.name)}")


def test_a_changed_checker_is_noticed(monkeypatch):
    from derived_book import exercises as checker

    exercise = {e.label: e for e in assignments()["chapter05"][0]}["ex-05-rms"]
    monkeypatch.setattr(checker, "check_properties", lambda *a, **k: None)
    with pytest.raises(ExerciseError, match="known to be wrong.*has been changed"):
        graded(exercise, exercise.mistakes[0].code)


def test_a_solution_that_does_not_pass_is_named():
    exercises = assignments()["chapter05"][0]
    sound, other = (e for e in exercises if e.label in ("ex-05-common", "ex-05-rms"))
    broken = dataclasses.replace(other, code=other.mistakes[0].code)
    (said,), seconds, memory = course.prove([sound, broken], 7)
    assert said.startswith("ex-05-rms: ExerciseError") and "ratio of two weights" in said
    assert 0 < seconds < 600 and 1e8 < memory < 4e9
    _, seconds, least = course.prove([], 7)
    assert seconds < 1 and least < 5e7 < memory, "only its own process must be measured"


# --- submissions ---------------------------------------------------------------------------------


def restored(*changes):
    """Return a notebook of chapter 5 after changes to its list of cells by name, and the notes."""
    _, source = assignments()["chapter05"]
    given = course.for_students(source)
    cells = {grading.grade_id(cell): cell for cell in given.cells}
    for change in changes:
        change(given.cells, cells)
    notes = list(grading.restore(given, copy.deepcopy(source), course.for_students(source)))
    return given, notes


def names_of(notebook):
    return [grading.grade_id(cell) for cell in notebook.cells]


def insert_copy(name, text, where=1, beside=None, **others):
    """Return a change that puts a copy of a cell, with another text, behind a cell or before it."""

    def change(cells, by_name):
        twin = copy.deepcopy(by_name[name])
        twin |= {"id": f"twin-{len(cells)}", "source": text, **others}
        cells.insert(cells.index(by_name[beside or name]) + where, twin)

    return change


def test_a_missing_cell_comes_back_where_it_was_and_answers_come_back_as_released():
    gone = {"ex-05-rms-answer", "ex-05-causal-check", "introduction"}

    def remove(cells, by_name):
        cells[:] = [cell for name, cell in by_name.items() if name not in gone]

    given, notes = restored(remove)
    _, source = assignments()["chapter05"]
    assert names_of(given) == names_of(source)
    assert len(notes) == 3 and "answer 'ex-05-rms-answer' was missing" in notes[2]
    answer = given.cells[names_of(given).index("ex-05-rms-answer")]
    assert answer.source == f"rms_attention = ...\n{course.STUB}"


def test_an_untouched_notebook_gets_the_source_s_locked_cells_and_no_note():
    given, notes = restored()
    _, source = assignments()["chapter05"]
    assert notes == [] and names_of(given) == names_of(source)
    for cell, original in zip(given.cells, source.cells, strict=True):
        locked = original.metadata["nbgrader"]["locked"]
        assert cell.metadata == original.metadata
        assert (cell.source == original.source) == locked or original.cell_type == "markdown"


OLD = {"nbgrader": {"grade_id": "ex-05-rms-answer", "schema_version": 1}}


@pytest.mark.parametrize(
    "metadata",
    [OLD, {}, {"nbgrader": {}}, {"nbgrader": None}, {"nbgrader": {"grade_id": ["rms"]}}],
    ids=["old schema", "none", "empty", "null", "list"],
)
def test_a_cell_without_its_metadata_gets_them_back(metadata):
    def strip(cells, by_name):
        by_name["ex-05-rms-answer"] |= {"metadata": copy.deepcopy(metadata), "source": "mine"}

    given, notes = restored(strip)
    answer = given.cells[names_of(given).index("ex-05-rms-answer")]
    assert notes == [] and answer.source == "mine"
    assert answer.metadata["nbgrader"]["schema_version"] == 3


@pytest.mark.parametrize("where", [0, 1], ids=["before", "behind"])
def test_of_copies_of_an_answer_in_words_the_one_that_was_worked_on_is_marked(where):
    (name, *_) = (x for x in names_of(assignments()["chapter05"][1]) if x.endswith("-words"))
    given, notes = restored(insert_copy(name, "By the theorem.", where))
    (kept,) = (cell for cell in given.cells if grading.grade_id(cell) == name)
    assert kept.source == "By the theorem." and f"{name!r} is there 2 times" in notes[0]


def test_behind_each_copy_of_an_answer_its_check_is_tried_and_the_best_counts():
    forged = {"derived_attention": {"trial": "ex-05-causal-check"}}
    given, notes = restored(
        insert_copy("ex-05-rms-answer", "worse = 1"),
        insert_copy("ex-05-causal-answer", "pass", metadata=forged),
    )
    assert len(notes) == 1 and "best result counts" in notes[0]
    at = [i for i, cell in enumerate(given.cells) if grading._trial(cell)]
    check = names_of(given).index("ex-05-rms-check")
    assert [given.cells[i].source for i in at] == [given.cells[check].source] * 2
    wrong = nbformat.v4.new_output("error", ename="E", evalue="no", traceback=[])
    first, second = (given.cells[i] for i in at)
    second.outputs, given.cells[check].outputs = [wrong], [wrong]
    grading.keep_best(given)
    assert not any(map(grading._trial, given.cells))
    check = given.cells[names_of(given).index("ex-05-rms-check")]
    assert check.outputs == first.outputs == []


def test_a_changed_check_is_put_back():
    def change(cells, by_name):
        by_name["ex-05-rms-check"].source = "pass"

    given, notes = restored(change)
    assert notes == ["The check 'ex-05-rms-check' had been changed, and has been put back."]
    check = given.cells[names_of(given).index("ex-05-rms-check")]
    assert "check_refuses" in check.source


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b'{"cells": [', "JSONDecodeError: Expecting value: line 1 column 12"),
        (b"[]", "cannot be read as a notebook"),
        (b'{"cells": 3, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}', "cannot be read"),
        ("é".encode("latin1"), "UnicodeDecodeError"),
        (b"[" * 100_000, "RecursionError"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path, content, reason):
    path = tmp_path / "chapter05.ipynb"
    path.write_bytes(content)
    assert reason in grading._read(path).metadata["derived_attention"]["ungraded"]
    assert grading._ours_in(path) == {}


@pytest.mark.parametrize("encoding", ["utf8", "utf-8-sig", "utf-16"])
def test_a_notebook_is_read_in_any_encoding_of_unicode(tmp_path, encoding):
    path = tmp_path / "chapter05.ipynb"
    students = course.for_students(assignments()["chapter05"][1])
    path.write_text(nbformat.writes(students), encoding)
    assert grading._read(path) == students
    assert grading._ours_in(path) == {"assignment": "chapter05"}


def test_a_renamed_notebook_is_found_and_two_of_them_are_not(tmp_path):
    _, source = assignments()["chapter05"]
    other, target = tmp_path / "chapter05 (1).ipynb", tmp_path / "chapter05.ipynb"
    nbformat.write(course.for_students(source), other)
    (tmp_path / "broken.ipynb").write_text("{")
    for _ in range(2):  # also when the notebooks are graded again
        given = [str(other)]
        grading.find_renamed("chapter05", "*", given)
        assert given == [str(target)]
        assert grading._ours_in(target)["renamed"] == "chapter05 (1)"
    shutil.copy(other, tmp_path / "chapter05 (2).ipynb")
    grading.find_renamed("chapter05", "*", given)
    assert "chapter05 (2).ipynb were handed in" in grading._ours_in(target)["ungraded"]
    target.write_text("")  # the student's own file stays, whatever it contains
    grading.find_renamed("chapter05", "*", given)
    assert target.read_text() == ""


def test_a_notebook_without_any_of_the_cells_is_not_graded():
    given, _ = restored(lambda cells, by_name: cells.clear())
    assert "none of this assignment's answers" in given.metadata["derived_attention"]["ungraded"]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def f(x):\n    y = x.mean(-1)\n    return y / y.sum()", []),
        ("import math\nfrom torch import nn", []),
        ("torch.randn = None", ["torch.randn = ..."]),
        ("import os.path as p", ["os"]),
        ("from derived_book import exercises", ["derived_book", "exercises"]),
        ("x = ().__class__", ["__class__"]),
        ("!ls", ["!ls"]),
        ("def check_properties(*x): pass", ["check_properties"]),
        ("!ls\nx = 1" + "\0", ["!ls"]),
        ("!ls\nx = " + "-" * 100_000 + "1", ["!ls"]),
        ("!ls\nx = a" + ".b" * 20_000, ["!ls"]),
    ],
)
def test_code_that_could_reach_the_checks_is_listed(code, found):
    assert grading.strange(code) == found


def test_exercises_of_two_chapters_with_one_last_word_have_columns_of_their_own():
    names = [f"ex-{x}-check" for x in ("01-causal", "05-causal", "05-rms")]
    assert [*grading._short(names).values()] == ["ex-01-causal", "ex-05-causal", "rms"]


def test_no_solution_of_the_book_is_listed():
    for exercises, _ in assignments().values():
        for exercise in exercises:
            known = {"derived_attention", "__init__"}  # a solution may import from the package
            assert not exercise.name or not set(grading.strange(exercise.code)) - known


# --- from the command line -----------------------------------------------------------------------

ANSWERS = ("ex-05-common", "ex-05-rms", "ex-05-causal", "ex-05-needle")  # 10, 15, 10 and 10 points
LOOP = """import time
while True:
    try:
        while True: time.sleep(1)
    except BaseException: pass"""
HUGE = "def rms_attention(q, k, v, eps):\n    return torch.zeros(10**12)"
DELETE = """import os, shutil
for place in ({folder!r}, {beside!r}):  # the test's own: a fence that fails must cost nothing
    shutil.rmtree(place, ignore_errors=True)
os._exit(0)"""
LEAVE = "import sys\nsys.exit()"
PATCH = """import derived_book.exercises as e
e.check_properties = check_properties = lambda *a, **k: print("Correct.")
causal_bn = lambda *a: None"""
RMS = """def rms_attention(q, k, v, eps):
    return softmax_attention(*((mean(x) + eps) ** -0.5 * x for x in (q, k)), v)"""
COPIES = (  # an old version behind the answer, an answer split in two, a check before its answer
    insert_copy("ex-05-common-answer", "own_attention = lambda q, k, v: q"),
    insert_copy("ex-05-rms-answer", "mean = lambda x: x.square().mean(-1, keepdim=True)", 0),
    insert_copy("ex-05-causal-check", "pass", 0, beside="ex-05-causal-answer"),
)
UNREADABLE = {"cut": b'{"cells": [', "blank": b"", "words": b"A notebook, in words."}


@pytest.fixture(scope="module")
def school(tmp_path_factory):
    """Students hand in chapter 5, and the lecturer's four commands are run."""
    folder = tmp_path_factory.mktemp("Kurs für alle")
    exercises, source = assignments()["chapter05"]
    course.write(7, {"chapter05": (title_of(source), exercises)}, folder / "course")
    folder = folder / "course" / "nbgrader"
    with open(folder / "nbgrader_config.py", "a") as config:
        config.write("c.Run.timeout = 20\n")
    said = {"generate_assignment": nbgrader(folder, "generate_assignment", "chapter05")}
    released = nbformat.read(folder / "release" / "chapter05" / "chapter05.ipynb", as_version=4)
    right = {e.label: e.code for e in assignments()["chapter05"][0]}
    wrong = {e.label: e.mistakes[0].code for e in assignments()["chapter05"][0] if e.name}
    hand_in(folder, "right", [right[x] for x in ANSWERS], words="By the theorem.")
    hand_in(folder, "wrong", [wrong[x] for x in ANSWERS[:2]], renamed="chapter05 (1)")
    hand_in(folder, "copies", [right[ANSWERS[0]], RMS, right[ANSWERS[2]]], copies=COPIES)
    for student, content in UNREADABLE.items():
        name = "chapter05.ipynb" if student != "words" else "answer.txt"
        (folder / "submitted" / student / "chapter05").mkdir(parents=True)
        (folder / "submitted" / student / "chapter05" / name).write_bytes(content)
    hand_in(folder, "greedy", [LOOP, HUGE, right["ex-05-causal"]])
    (folder.parent / "beside").mkdir()
    delete = DELETE.format(folder=str(folder), beside=str(folder.parent / "beside"))
    hand_in(folder, "hostile", [delete, LEAVE, PATCH])
    if not grading.fence_works():
        shutil.rmtree(folder / "submitted" / "hostile")  # nothing would stop it from deleting files
    lost = folder / "submitted" / "lost" / "chapter05"  # the students' version, unchanged
    lost.mkdir(parents=True)
    shutil.copy(folder.parent / "student" / "chapter05.ipynb", lost)
    for late in ("copies", "greedy"):
        stamp = folder / "submitted" / late / "chapter05" / "timestamp.txt"
        stamp.write_text("2026-11-12 20:00:00 UTC")
    with Gradebook(f"sqlite:///{folder}/gradebook.db") as gradebook:
        gradebook.update_or_create_assignment("chapter05", duedate="2026-11-10 12:00 UTC")
    groups = ("[!chlrw]*", "[chlrw]*")  # the first mostly waits for an endless cell
    with ThreadPoolExecutor() as pool:  # both groups at once
        grade = partial(nbgrader, folder, "autograde", "chapter05")
        said["autograde"] = "".join(pool.map(grade, (f"--student={x}" for x in groups)))
    nbgrader(folder, "generate_feedback", "chapter05", "--student=wrong")
    said["export"] = nbgrader(folder, "export")
    return folder, released, said


def nbgrader(folder, *arguments):
    """Run a command of nbgrader as a lecturer does, in the environment; return what it says."""
    command = [sys.executable, "-m", "nbgrader", *arguments]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    world = os.environ | {"PATH": path}  # nbgrader calls alembic
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=world)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def hand_in(folder, student, answers, words=None, renamed="chapter05", copies=()):
    """Put a student's notebook where nbgrader looks for it."""
    notebook = nbformat.read(folder / "release/chapter05/chapter05.ipynb", as_version=4)
    cells = {grading.grade_id(cell): cell for cell in notebook.cells}
    for label, code in zip(ANSWERS, answers, strict=False):
        cells[f"{label}-answer"].source = code
    for name, cell in cells.items():
        if words and name.endswith("-words"):
            cell.source = words
    for change in copies:
        change(notebook.cells, cells)
    target = folder / "submitted" / student / "chapter05"
    target.mkdir(parents=True)
    encoding = "utf-8-sig" if copies else "utf8"
    (target / f"{renamed}.ipynb").write_text(nbformat.writes(notebook), encoding)


def outcome(folder, student):
    """Return the errors of a student's cells, and the notes on top."""
    path = folder / "autograded" / student / "chapter05" / "chapter05.ipynb"
    notebook = nbformat.read(path, as_version=4)
    errors = {
        grading.grade_id(cell): output.evalue
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "error"
    }
    return errors, notebook.cells[0].source


def marks(folder):
    with open(folder / "grades.csv", encoding="utf8") as file:
        return {row["student_id"]: row["score"] or row["note"] for row in csv.DictReader(file)}


def test_nbgrader_releases_what_students_get(school):
    _, released, _ = school
    ours = course.for_students(assignments()["chapter05"][1])
    assert [c.source.strip() for c in released.cells] == [c.source.strip() for c in ours.cells]


def test_marks_are_those_that_the_answers_deserve(school):
    folder, _, _ = school
    found = marks(folder)
    hostile = {"hostile": "0.0"} if grading.fence_works() else {}
    graded = {name: mark for name, mark in found.items() if name not in UNREADABLE}
    some = {"right": "40.0", "wrong": "0.0", "greedy": "10.0", "copies": "32.0", "lost": "0.0"}
    assert graded == some | hostile


def test_who_hands_in_what_cannot_be_read_gets_a_message_and_no_marks(school):
    folder, _, said = school
    found = marks(folder)
    assert "JSONDecodeError" in found["cut"] and found["blank"] == "the file is empty"
    assert found["words"] == "there is no notebook among answer.txt"
    line = "blank: 0 of 40 points by checks; It has not been graded: the file is"
    assert line in said["autograde"]
    assert "hand it in again" in outcome(folder, "cut")[1]


def test_autograde_prints_a_line_on_each_student_and_a_table(school):
    said = school[2]["autograde"]
    warned = [line for line in said.splitlines() if "WARNING" in line]
    expected = "namespaces|No notebooks were matched|late"
    assert not [line for line in warned if not re.search(expected, line)], warned
    assert "SAWarning" not in said
    assert "lost: 0 of 40 points by checks; no answer to causal, needle, common, rms\n" in said
    assert re.search(r"right: 40 of 40 points by checks; \d to mark by hand\n", said)
    assert re.search(r"1 of \d \(\d+ min left\), blank: ", said)
    assert re.search(r"wrong: 0 of 40 .*; common: Failed: .*; rms: Failed: ", said)
    assert re.search(r"student +causal +needle +common +rms +of 40 +by hand +notes\n", said)
    assert re.search(r"copies +10 +0 +10 +12 +32 +0 +\d\n", said)


def test_every_zero_has_a_reason(school):
    folder, _, said = school
    wrong, notes = outcome(folder, "wrong")
    assert "handed in as chapter05 (1).ipynb" in notes
    mistakes = {e.label: e.mistakes[0].message for e in assignments()["chapter05"][0] if e.name}
    for label in ANSWERS[2:]:  # these answers are unchanged
        mistakes[label] = "there is no answer"
    for label in ANSWERS:
        assert re.search(mistakes[label], wrong[f"{label}-check"])
    assert outcome(folder, "right")[0] == {}
    greedy, _ = outcome(folder, "greedy")
    assert "longer than 20 s" in greedy["ex-05-common-answer"]
    assert "allocate" in greedy["ex-05-rms-check"] and "ex-05-causal-check" not in greedy
    assert "common: the cell took longer" in said["autograde"]


def test_a_hostile_notebook_deletes_nothing_and_is_listed(school):
    folder, _, said = school
    if not grading.fence_works():
        assert "does not let its users make namespaces" in said["autograde"]
        return
    errors, notes = outcome(folder, "hostile")
    assert "ended Python" in errors["ex-05-common-answer"]
    assert "known to be wrong" in errors["ex-05-causal-check"]
    assert len(re.findall(r"Read cell \d+ yourself", notes)) == 3
    assert (folder / "source" / "chapter05" / "chapter05.ipynb").exists()
    assert (folder.parent / "beside").exists()


def test_feedback_gives_no_hidden_test_and_no_expected_answer(school):
    folder, _, _ = school
    page = (folder / "feedback" / "wrong" / "chapter05" / "chapter05.html").read_text("utf8")
    assert "Failed: " in page and "check_refuses" not in page and "Expected answer" not in page


# --- during a semester ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def later(school, tmp_path_factory):
    """A copy of the course some weeks later, in which an answer in words has been marked."""
    folder = tmp_path_factory.mktemp("later") / "course"
    shutil.copytree(school[0], folder)
    with Gradebook(f"sqlite:///{folder}/gradebook.db") as gradebook:
        grade = gradebook.find_grade("ex-05-crowd-words", "chapter05", "chapter05", "right")
        grade.manual_score, grade.needs_manual_grade = 7, False
        gradebook.db.commit()
    return folder


def test_corrected_tests_count_and_late_hand_ins_lose_what_the_policy_says(later):
    """After a new release, marks by hand stay; whoever has an extension loses less."""
    path = later / "source" / "chapter05" / "chapter05.ipynb"
    notebook = nbformat.read(path, as_version=4)
    check = next(c for c in notebook.cells if grading.grade_id(c) == "ex-05-common-check")
    check.source = check.source.replace("### END", "assert False, 'corrected'\n### END")
    nbformat.write(notebook, path)
    nbgrader(later, "generate_assignment", "chapter05", "--force")
    said = nbgrader(later, "autograde", "chapter05", "--force", "--student=right")
    assert "1 of 1, right: 30 of 40 points by checks;" in said and "common: corrected" in said
    with Gradebook(f"sqlite:///{later}/gradebook.db") as gradebook:
        gradebook.grant_extension("chapter05", "greedy", days=2)
    nbgrader(later, "export", "--Grades.late=10")  # `copies` is two days and eight hours late
    assert marks(later)["right"] == "37.0" and [*marks(later)] == sorted(marks(later))
    assert float(marks(later)["copies"]) == pytest.approx(0.7 * 32)
    assert float(marks(later)["greedy"]) == pytest.approx(0.9 * 10)


def test_a_question_after_hand_ins_is_an_assignment_of_its_own(later, problems):
    (problems / "quiz1.md").write_text(PROBLEM.replace("draws(3, 4)", "iter('ab')"), "utf8")
    found = course.course(problems)
    path = later / "source" / "chapter05" / "chapter05.ipynb"
    before = path.read_bytes()
    for name in ("chapter05", "quiz1"):
        course.write(7, {name: found[name]}, later.parent)
        shutil.copytree(later.parent / "nbgrader" / "source", later / "source", dirs_exist_ok=True)
    with pytest.raises(AssertionError, match="Cannot add or remove cells"):
        nbgrader(later, "generate_assignment", "chapter05", "--force")
    path.write_bytes(before)
    nbgrader(later, "generate_assignment", "quiz1")
    assert (later / "release" / "quiz1" / "quiz1.ipynb").exists()


# --- problems for lecturers ----------------------------------------------------------------------


@pytest.fixture
def problems(tmp_path):
    folder = tmp_path / "problems"
    folder.mkdir()
    (folder / "05_normalise_and_scale.md").write_text(PROBLEM, "utf8")
    exam = PROBLEM.replace("own-05", "own-exam").replace("draws(3, 4)", "iter('ab')")
    (folder / "exam.md").write_text(exam, "utf8")
    return folder


def test_problems_stand_behind_those_of_the_book(problems):
    found = course.course(problems)
    paper, twice = found["chapter05"][1][-2:]
    assert [paper.number, twice.number] == ["5.9", "5.10"] and "Definition 1.1" in paper.text
    assert course.points(paper) == (0, 3) and course.points(twice) == (5, 0)
    source = course.source("Five", "chapter05", found["chapter05"][1], 7)
    text = text_of(course.for_students(source))
    assert not re.search("two thirds|of x and itself", text)
    assert "Everything up to an exercise goes" in text and "SEED = 21\n" in text
    assert "2 for the argument" in text_of(source)
    assert [e.number for e in found["exam"][1]] == ["1", "2"]
    # A question may use the chapter's definitions, whichever questions are chosen with it.
    assert "def draws(" in text_of(course.source("Five", "quiz", [twice], 7))
    assert course.prove([twice], 7)[0] == []


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ("# Own questions\n", "", "exam.md has no title, or an exercise that cannot be read"),
        (":label: own-05-paper\n", "", "expected the form of course/own_questions.md"),
        (" (5 minutes)", "", "own-05-paper lacks its minutes or its cell"),
        ("twice = ...", "answer = 1", "own-05-twice lacks its minutes or its cell"),
        (":::{solution-end}", "", "own-05-twice has no solution; expected one"),
    ],
)
def test_a_page_of_problems_that_cannot_be_read_says_why(problems, wrong, right, message):
    assert wrong in PROBLEM
    (problems / "exam.md").write_text(PROBLEM.replace(wrong, right), "utf8")
    with pytest.raises(ValueError, match=message):
        course.course(problems)


def test_a_label_stands_once_in_an_assignment(problems):
    exercises = course.course(problems)["chapter05"][1]
    with pytest.raises(ValueError, match="quiz contains 'own-05-twice.*' twice; expected each"):
        course.source("Quiz", "quiz", exercises[-1:] * 2, 7)


def test_a_folder_without_pages_is_named(tmp_path):
    with pytest.raises(ValueError, match="contains no pages; expected files"):
        course.course(tmp_path)


@pytest.mark.parametrize("name", ["chapter05", "Chapter05", "05_else", "appendixD"])
def test_problems_do_not_replace_those_of_the_book(problems, name):
    (problems / f"{name}.md").write_text(PROBLEM, "utf8")
    with pytest.raises(ValueError, match=f"{name}.md would replace .* ({name}|chapter05);"):
        course.course(problems)


def test_the_secret_behind_hidden_tests_is_kept_and_not_short(tmp_path):
    drawn = course.hidden_seed("", tmp_path)
    assert drawn == course.hidden_seed("", tmp_path) != course.hidden_seed("", tmp_path / "other")
    assert course.hidden_seed("a long secret", tmp_path) == course.hidden_seed("", tmp_path)
    with pytest.raises(ValueError, match="SEED has 1 characters; expected 8 or more"):
        course.hidden_seed("7", tmp_path)


def test_sealed_problems_open_with_their_passphrase_alone(problems, tmp_path):
    archive, opened = tmp_path / "problems.enc", tmp_path / "opened"
    course.seal(problems, "a long passphrase", archive)
    content = archive.read_bytes()
    assert b"Problems" not in content and b"twice" not in content
    course.unseal("a long passphrase", opened, archive)
    before, after = ({p.name: p.read_text("utf8") for p in x.iterdir()} for x in (problems, opened))
    assert before == after
    with pytest.raises(ValueError, match="does not open problems.enc"):
        course.unseal("another passphrase", opened, archive)
    archive.write_bytes(content[:-4] + b"AAAA")
    with pytest.raises(ValueError, match="does not open problems.enc"):
        course.unseal("a long passphrase", opened, archive)
    with pytest.raises(ValueError, match="has 5 characters; expected 12 or more"):
        course.seal(problems, "short", archive)
    with pytest.raises(ValueError, match="contains no pages"):
        course.seal(opened / "nothing", "a long passphrase", archive)


@pytest.mark.parametrize("arguments", [["seal"], ["write", "problems"]])
def test_a_folder_is_named_to_be_sealed_and_only_then(arguments, monkeypatch, capsys):
    monkeypatch.setattr(course, "seal", lambda *_: pytest.fail("`seal` was called"))
    monkeypatch.setattr(course.sys, "argv", ["course.py", *arguments])
    with pytest.raises(SystemExit):
        course.main()
    assert "`seal` needs a FOLDER of pages" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["chapter}`nopage", "doc}`nopage", "cite:t}`Nobody2020"])
def test_a_reference_to_what_is_not_there_is_named(role):
    with pytest.raises(ValueError, match=f"own.md (refers to|cites) '{role.partition('`')[2]}'"):
        plain(f"See {{{role}`.", Path("own.md"))
