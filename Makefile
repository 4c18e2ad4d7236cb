# Two commands: `make book` builds the book, `make test` builds it and runs every test.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
HTML   := _build/html
PAGES  := $(abspath $(HTML))/index.html
SOURCES := $(shell find book src _ext assets $(wildcard benchmarks) -type f -not -path '*/__pycache__/*' -not -path '*.egg-info*')
SETTINGS := $(DERIVED_ATTENTION_PROFILE) $(BOOK_REPOSITORY_URL) $(BOOK_REPOSITORY_BRANCH) $(BOOK_JUPYTERHUB_URL)

# Jupyter takes this environment's kernel, not one of the same name in the reader's home.
export JUPYTER_PREFER_ENV_PATH := 1

.PHONY: help book test lint lab notebooks zip benchmarks experiments full lighthouse clean FORCE
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := book

help: ## list what make can do
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1	\2/p' Makefile | expand -t 18

book: $(HTML)/.complete ## build the book, as `make` alone does; what has not changed is not done again
	@echo "The book is ready. Open $(PAGES)"

test: lint book ## check everything: style, types, the book with warnings as errors, all tests
	@echo "Running the tests: some minutes; each dot is one that has passed."
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --no-header -n auto --dist worksteal

lint: $(VENV)/.ready ## check style and types alone
	@echo "Checking the style (ruff)."
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "To mend the layout: $(BIN)/ruff format ."; exit 1; }
	@echo "Checking the types (mypy)."
	@$(BIN)/mypy --no-error-summary

lab: $(VENV)/.ready ## open the chapters as notebooks in JupyterLab
	@$(BIN)/python -m jupyterlab notebooks

notebooks: book ## bring the committed notebooks in step with the pages
	@rm -f notebooks/*.ipynb
	@cp _build/notebooks/*.ipynb notebooks/

zip: book ## pack the book into one archive, for readers without a network
	@$(BIN)/python -c 'import shutil; print(shutil.make_archive("_build/derived-attention", "zip", "_build", "html"))'

benchmarks: $(VENV)/.ready ## measure every mechanism and other libraries; what this machine has results for is not repeated
	@$(BIN)/python -m benchmarks
	@$(BIN)/python -m benchmarks.kernels

experiments: $(VENV)/.ready ## train what the pages have no room for: three and a half hours on one core
	@$(BIN)/python -m benchmarks.multiresolution
	@$(BIN)/python -m benchmarks.mixtures
	@$(BIN)/python -m benchmarks.control
	@$(BIN)/python -m benchmarks.primal
	@$(BIN)/python -m benchmarks.splitting
	@$(BIN)/python -m benchmarks.small
	@$(BIN)/python -m benchmarks.side_by_side
	@$(BIN)/python -m benchmarks.side_by_side cost

full: $(VENV)/.ready ## run a chapter with the papers' settings, unattended: make full CHAPTER=10
	@$(BIN)/python _ext/full.py $(CHAPTER)

lighthouse: book ## measure how fast the pages are on a phone and on a desktop; needs Chromium
	@$(BIN)/python _ext/lighthouse.py

clean: ## remove what was built; the environment and the downloads stay
	@rm -rf _build

$(HTML)/.complete: $(VENV)/.ready _build/.extensions $(SOURCES)
	@$(BIN)/python _ext/make_book.py
	@touch $@

# Says nothing, and touches nothing, while the environment is as it was left.
$(VENV)/.ready: FORCE
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "There is no $(PYTHON) here. Python 3.11 or newer is needed: make book PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" _ext/environment.py "$(VENV)"

# Sphinx does not notice a change in its extensions or settings: let it read every page again.
_build/.extensions: $(wildcard _ext/*.*) benchmarks/table.py benchmarks/results/plan.json _config.yml _toc.yml book/references.bib _build/.settings
	@rm -rf _build/.doctrees $(HTML)/_modules
	@touch $@

# What the environment says; touched only when that differs from the last build.
_build/.settings: FORCE
	@mkdir -p _build
	@echo "$(SETTINGS)" | cmp -s - $@ || echo "$(SETTINGS)" >$@
