"""Tests of the Node process that renders formulas: one for each process, until the build ends."""

import multiprocessing
import os

import pytest

import katex_prerender as katex


@pytest.fixture(autouse=True)
def server():
    """Return a new Node process, with an empty cache."""
    katex._katex.cache_clear()
    yield katex._server(os.getpid())
    katex._stop(None, None)


def test_lines_and_other_scripts_come_back_whole(server):
    for tex in ("x\n= y", "\\text{été \u4e00 \U0001d538}"):
        assert 'class="katex"' in katex._katex(tex, True)
    assert katex._server(os.getpid()) is server, "expected one Node server"


def test_a_formula_that_is_refused_does_not_end_it():
    with pytest.raises(katex.FormulaError, match="ParseError.*Undefined control sequence"):
        katex._katex("\\nonsense", False)
    with pytest.raises(katex.FormulaError, match="Unexpected character"):
        katex._katex("a\u2028b", False)  # Node reads U+2028 as the end of a line
    assert "katex-display" not in katex._katex("x", False)


def test_it_ends_with_the_build(server):
    katex._katex("x", False)
    katex._stop(None, None)
    assert server.returncode == 0
    katex._stop(None, None)  # as in a build without formulas


def test_a_process_that_has_died_is_an_error_with_its_status(server):
    server.kill()
    with pytest.raises(katex.ExtensionError, match="exit status -9"):
        katex._katex("x", False)
    katex._server.cache_clear()


def _render(queue, tex):
    queue.put(katex._katex(tex, False))
    katex._stop(None, None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_forked_processes_have_servers_of_their_own(server):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    formulas = [f"x^{{{i}}}" for i in range(4)]
    workers = [context.Process(target=_render, args=(queue, tex)) for tex in formulas]
    for worker in workers:
        worker.start()
    found = {queue.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join(60)
    assert found == {katex._katex(tex, False) for tex in formulas}
