"""Settings of nbgrader for the assignments of "Derived Attention", written by `make course`."""

import sys
import warnings

from nbgrader import preprocessors as theirs

from derived_book import grading

# Silences SQLAlchemy, which warns for each student because of how nbgrader uses its database.
warnings.filterwarnings("ignore", message="Object of type .* not in session")

c = get_config()  # noqa: F821
c.CourseDirectory.course_id = "derived-attention"
# Percentage of the marks that is lost for each day, or part of a day, after the due date.
c.Grades.late = 0
# `autograde` prints one line for each student; --log-level=INFO prints nbgrader's steps as well.
if "autograde" in sys.argv:
    c.Application.log_level = "WARN"
c.ClearSolutions.code_stub = {"python": "# Your answer, instead of the three dots."}
c.ClearSolutions.text_stub = "*Your answer.*"
# The locked cell above an answer that is marked by hand contains the marking scheme.
c.ClearMarkScheme.enforce_metadata = False
c.Autograde.pre_convert_hook = grading.find_renamed
c.Autograde.exporter_class = grading.Reader
c.ExportApp.plugin_class = grading.Grades
c.Autograde.sanitize_preprocessors = [
    grading.HandIn,
    theirs.ClearOutput,
    theirs.DeduplicateIds,
    theirs.OverwriteKernelspec,
    theirs.OverwriteCells,
    theirs.CheckCellMetadata,
]
c.Autograde.autograde_preprocessors = [
    grading.Run,
    theirs.IgnorePattern,
    theirs.LimitOutput,
    theirs.SaveAutoGrades,
    theirs.CheckCellMetadata,
    grading.Summary,
]
# nbgrader gives no points to a cell with a warning, but here a warning is no error.
c.IgnorePattern.enabled = True
c.IgnorePattern.pattern = "(?s).*"
# The feedback for students contains neither hidden tests nor expected answers.
c.GenerateFeedback.preprocessors = [
    theirs.GetGrades,
    theirs.ClearHiddenTests,
    theirs.ClearMarkScheme,
    "nbconvert.preprocessors.CSSHTMLHeaderPreprocessor",
]
