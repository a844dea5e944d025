# make install   set up .venv with everything the tests and the demo need
# make demo      train two models plain and in half the memory, or the least that fits, and compare
# make test      the whole test suite
# make test-fast the inner loop: units that need no model, in under four minutes on two cores
# make docs      the documentation as a site that opens offline: site/index.html
# make browser   Debian's Chromium for the tests of the report, where it is missing and can be installed
# make check     ruff, mypy and the import rules
# make bench     every benchmark suite, one after the other
# make bench-solvers   the solvers alone, on the instances that come with the sources

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Two test processes with one thread each are faster on two cores than two that fight over both.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
WORKERS ?= 2

.PHONY: install demo test test-fast docs docs-pages browser check bench bench-solvers clean

install: $(VENV)/.installed

# torch goes first: later resolutions then keep it instead of looking for a newer one.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Remat needs Python 3.11 or later; run make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet torch -c constraints.txt
	$(RUN) -m pip install --quiet -e '.[torch,solvers,report,docs,test,dev]' -c constraints.txt
	@touch $@

demo: install
	$(RUN) -m remat demo

test: install browser
	$(TEST_ENV) $(RUN) -m pytest -n $(WORKERS) --dist worksteal

# Import rules and the units of core, solvers, layout, report and the command line, without slow ones and without commands
# that train models: what a change to one of these folders breaks first. No framework units, no contract suite, no docs.
FAST := tests/test_imports.py tests/unit/core tests/unit/solvers tests/unit/layout tests/unit/report tests/unit/cli \
  $(foreach name,model_commands curves profile,--ignore=tests/unit/cli/test_$(name).py)
test-fast: install
	$(TEST_ENV) $(RUN) -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(FAST)

# NO_MKDOCS_2_WARNING: mkdocs-material speaks of the future of mkdocs at every build.
docs: install
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo "Open site/index.html"

# The pages that are made from results and sources; a test compares them.
docs-pages: install
	$(RUN) docs/write_benchmarks.py
	$(RUN) docs/write_command_line.py

# Tests that need a browser are skipped where there is none.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	    && { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1; \
	} || echo "No Chromium here and it could not be installed: browser tests will be skipped."

check: install
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pytest -q tests/test_imports.py

bench: install
	@for suite in $(basename $(notdir $(sort $(wildcard benchmarks/bench_*.py)))); do \
	  echo "== $$suite"; $(RUN) -m benchmarks.$$suite || exit 1; done

bench-solvers: install
	$(RUN) -m benchmarks.bench_solvers benchmarks/instances --time-limit 60

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis remat-demo remat-bench dist site
