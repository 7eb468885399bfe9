# One-time set-up and the four habits: demo, test, style, bench. Needs Python 3.10+ and a package index, nothing else.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: demo test test-slow test-gpu style bench clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/mediaspec demo --out out

test: $(VENV)/.installed
	$(BIN)/python -m pytest

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow

test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest -m gpu

style: $(VENV)/.installed
	$(BIN)/ruff check mediaspec tests tools
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/mediaspec bench image --rules plain,exact,coupled,coupled@jacobi,cool_sd:delta=1.1,cool_sd:delta=2,lantern++,gsd --repeats 5 --json --out bench

clean:
	rm -rf $(VENV) out bench build *.egg-info
