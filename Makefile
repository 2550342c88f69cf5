# make demo      install, then train on glyphs and draw the results
# make test      install, then run all checks and tests
# make chaos     stress tests: kill, interrupt and overload commands (about an hour; SHORTLIST_CHAOS_SEED=n repeats a seed)
# make check     run lint, types, import contracts, and checks of workflows and shell scripts
# make docs      build the documentation site into build/site
# make bench     run the benchmarks of the losses and the large-batch step (hours on 2 cores; BENCH="--targets" for the targets only)
# make mutants   run mutation tests of a module (MUTANTS="MODULE TESTS")
# make audit     look up the versions of constraints.txt in a database of vulnerabilities (needs the network)
# make results   write the tables and the plot of docs/results.md from the raw results
# make figures   draw docs/images, including screenshots (needs Chromium)
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH ?=
SHORTLIST_CHAOS_SEED ?= $(shell date +%s)
MUTANTS ?= src/shortlist/batches/sampler.py tests/batches/test_sampler.py
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE # otherwise each process started by a test compiles the sources again

.PHONY: setup demo check docs test pytest chaos bench mutants results figures audit clean

setup: $(READY)

# Installs again only if the dependencies have changed.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make needs Python 3.11 or newer, not " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet --no-build-isolation -e ".[dev]"
	touch $@

demo: $(READY)
	$(BIN)/shortlist demo

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docs/deploy/compose.yaml
	if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint docs/deploy/Dockerfile; fi
	$(BIN)/shellcheck .ci/run docs/cluster/*.sh
	$(BIN)/zizmor --offline --strict-collection --quiet .github

# mkdocs prints an advertisement unless it is told not to.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# One worker more than there are cores, because tests often wait for processes, files and the browser.
test: $(READY)
	$(MAKE) --jobs=2 check pytest

pytest: $(READY)
	$(BIN)/python -m pytest -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --dist worksteal

# Loopback only, and no longer than 3 hours.
chaos: $(READY)
	SHORTLIST_CHAOS=long SHORTLIST_CHAOS_SEED=$(SHORTLIST_CHAOS_SEED) timeout 3h $(BIN)/python -m pytest tests/chaos

bench: $(READY)
	$(BIN)/python benchmarks/loss.py $(BENCH)
	$(BIN)/python benchmarks/step.py $(BENCH)

mutants: $(READY)
	$(BIN)/python tests/mutants.py $(MUTANTS)

results: $(READY)
	$(BIN)/python benchmarks/evidence_tables.py

figures: $(READY)
	$(BIN)/python docs/figures.py
	$(BIN)/python docs/screenshots.py

# In an environment of its own: pip-audit is not needed for anything else.
audit:
	$(PYTHON) -m venv build/audit
	PIP_CONSTRAINT= build/audit/bin/python -m pip install --quiet pip-audit
	build/audit/bin/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
