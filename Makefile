.DEFAULT_GOAL := help
.PHONY: help demo test slow lab check clean

export PATH := $(CURDIR)/.venv/bin:$(PATH)
READY := .venv/.ready
CODE := src tests examples tools $(wildcard benchmarks)
TEXT := $(wildcard *.md docs)

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' Makefile

demo: $(READY)  ## plan a training on 4 emulated hosts at 400 Mbit/s, train it there, and compare (3 minutes)
	thinwire demo

test: $(READY)  ## run the tests, but for those of the lab and a few slow ones
	python -m pytest -m "not lab and not slow" -n 3 --dist worksteal

slow: $(READY)  ## run the tests that `make test` leaves out because they take a minute each
	python -m pytest -m slow

lab: $(READY)  ## run the lab's own tests: network namespaces, shaped paths, faults (a few minutes)
	python -m pytest -m lab

check: $(READY)  ## format, lint, types, imports between packages, spelling
	ruff format --check $(CODE)
	ruff check $(CODE)
	mypy $(CODE)
	lint-imports --no-logo
	codespell $(CODE) $(TEXT)

clean:  ## remove .venv, caches and build outputs; runs/ stays
	rm -rf .venv build dist src/*.egg-info .*_cache .hypothesis
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

$(READY): pyproject.toml tools/setup
	tools/setup
	@touch $@
