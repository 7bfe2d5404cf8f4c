# Two commands do all on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
BIN := .venv/bin
RUN := runs/demo

.PHONY: demo test selftest lint install clean

demo: install
	$(BIN)/python -m train run demo --run-dir $(RUN)
	$(BIN)/python -m parity convert --from flax --to torch-reference --overwrite $(RUN) $(RUN)/torch_reference.safetensors
	$(BIN)/python -m parity check --checkpoint $(RUN) --json $(RUN)/parity.json

# The reference's tests once more with its shapes checked, which torch.compile cannot trace through.
test: install
	CHECK_TORCH_SHAPES=1 $(BIN)/python -m pytest -n 2 tests/torch_reference
	$(BIN)/python -m pytest -n 2

# Plants known porting bugs and blind mutations, and checks clean pairs: the quick part of `python -m parity selftest`.
selftest: install
	$(BIN)/python -m parity selftest --quick --json runs/selftest.json

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

install: .venv/installed

# Versions come from constraints.txt; a virtual environment that was left half made is made anew.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expected Python 3.11 or newer, got " + sys.version)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[torch,test,lint]'
	touch $@

clean:
	rm -rf .venv runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
