# `make` lists the targets. PYTHON chooses the interpreter for a new .venv: make venv PYTHON=python3.12
# WORKERS is how many processes share the tests; 0 runs them in this one: make check WORKERS=0
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
STAMP := .venv/installed
PAGE := autopar/show/page
CHROMIUM ?= /usr/bin/chromium
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
unexport PYTHONDONTWRITEBYTECODE  # tests start interpreters, each of which would compile all sources again

.PHONY: help venv lint test test-browser exhaustive check demo docs golden clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 19

venv: $(STAMP)  ## create .venv with everything that tests and examples need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"autopar needs Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}: make venv PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,examples]'
	@touch $@

$(STAMP)-docs: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

test: venv  ## run the tests
	$(PYTEST) -m "not exhaustive"

test-browser: venv  ## build the page of plans, test its scripts, and open pages in headless Chromium (installed where it lacks)
	command -v $(CHROMIUM) || (apt-get -qq update && apt-get -qq install --yes --no-install-recommends chromium)
	cd $(PAGE) && npm ci --no-audit --no-fund && npm run build && npm test
	git diff --exit-code --stat -- autopar/show/page.html  # it is built from what is committed
	$(BIN)/python -m tests.show.write_pages out/pages
	cd $(PAGE) && CHROMIUM=$(CHROMIUM) npm run browser -- $(CURDIR)/out/pages --shots $(CURDIR)/out/pages

exhaustive: venv  ## run the tests with all their cases
	$(PYTEST)

lint: venv  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint  ## lint, types and the fast tests
	$(PYTEST) -q -m "not slow and not exhaustive"

demo: venv  ## plan and train a small model on 4 local processes, beside one device and hand-written plans
	$(BIN)/autopar demo

docs: $(STAMP)-docs  ## make a site of docs/ in out/site; any warning, as of a dead link, is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

golden: venv  ## rewrite the golden files from what the code does now; read the diff before you commit it
	$(PYTEST) -q --update-golden

clean:  ## remove .venv, caches and build output
	rm -rf .venv build dist out *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
