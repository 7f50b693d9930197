# The commands of a clone. All need only Python 3.11 or newer, a C++ compiler and a package index.
#
#   make install       .venv with pinned versions and the fuselab command in it
#   make demo          the small DLRM studied, trained and scored; DATA=path takes your Criteo file
#   make test          everything that can run on this machine
#   make test-timing        the tests that need a quiet machine, one after the other
#   make test-capabilities   the main tests as CPUs with fewer instructions run them
#   make format        ruff's format, and what ruff can mend
#   make lint types compile-check
#   make build         wheel and source archive in dist/, tried from an empty folder
#   make docs          the site in site/, every link checked
#   make extension     an operator as a C++ extension: load_inline, a wheel, CMake and Ninja
#
# PIP_ARGS goes to pip, for example an --extra-index-url with CPU-only wheels of torch.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo "$$python" && break; done)
PIP_ARGS ?=
PYTEST_ARGS ?=
DATA ?=
REPORT := fuselab-study
export DATA

.PHONY: install demo test test-timing test-capabilities format lint types compile-check extension build docs

# Always asked: the script answers in 50 ms when .venv is complete.
install:
	@test -n "$(PYTHON)" || { echo "install: no Python 3.11 or newer found; install one, or call \
	make PYTHON=/path/to/python3." >&2; exit 1; }
	@"$(PYTHON)" tools/install.py $(PIP_ARGS)

demo: install
	@.venv/bin/python -m fuselab study dlrm -o $(REPORT) $${DATA:+--data "$$DATA"}
	@rm -rf $(REPORT)/trained
	@.venv/bin/python -m fuselab train dlrm --steps 800 --epochs 1 --rows 60000 --optimizer adagrad --lr 0.02 \
		--checkpoint $(REPORT)/trained $${DATA:+--data "$$DATA"}
	@.venv/bin/python -m fuselab predict $(REPORT)/trained --latency
	@.venv/bin/python -m fuselab export dlrm $(REPORT)/trained --graph $(REPORT)/dlrm.svg
	@echo "The report lies in $(CURDIR)/$(REPORT)/report.html, the trained model beside it"

test: install
	@.venv/bin/python -m pytest -n 2 $(PYTEST_ARGS)

test-timing: install
	@.venv/bin/python -m pytest -m timing $(PYTEST_ARGS)

test-capabilities: install
	@.venv/bin/python tools/test_capabilities.py $(PYTEST_ARGS)

format: install
	@.venv/bin/python -m ruff format
	@.venv/bin/python -m ruff check --fix

lint: install
	@.venv/bin/python -m ruff check
	@.venv/bin/python -m ruff format --check
	@.venv/bin/python tools/docstring_check.py

types: install
	@.venv/bin/python -m mypy

compile-check: install
	@.venv/bin/python tools/compile_check.py

extension: install
	@.venv/bin/python examples/extension/build.py

build: install
	@.venv/bin/python tools/build_wheel.py

docs: install
	@.venv/bin/python -m mkdocs build --strict
