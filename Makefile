# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` are all a newcomer needs; `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# The order of prerequisites below is the order of what a person sees.
.NOTPARALLEL:

# Go's name for this machine; asked of uname, so that `make help` works without Go.
ARCH := $(subst aarch64,arm64,$(subst x86_64,amd64,$(shell uname -m)))
BIN := server/src/opensandbox_server/_bin/linux-$(ARCH)
PYTHON_BIN := .venv/bin/python
PROJECTS := server sdks/python sdks/python-code-interpreter cli

VENV := .venv/.installed
COMPAT := .venv-compat/.installed
BINARIES := $(BIN)/.built
STATICCHECK := .tools/staticcheck

GO_SOURCES := $(shell find node -name '*.go' -not -name '*_test.go' 2>/dev/null) node/go.mod node/go.sum node/code/kernel/python.py
PYTHON_CODE := $(wildcard server sdks/python sdks/python-code-interpreter cli tools tests examples bench node/code/kernel)

# --- for a newcomer --------------------------------------------------------------------------------

.PHONY: help
help: ## this list
	@echo "OpenSandbox: a safe place for AI agents to run code, on infrastructure you own."
	@echo
	@[[ -t 1 ]] && bold=$$'\033[1m' plain=$$'\033[0m' || bold= plain=; \
	awk -F ':.*## ' -v bold="$$bold" -v plain="$$plain" \
		'/^# --- for/ { gsub(/^# -+ | -+$$/, ""); printf "%s%s\n", sep, $$0; sep = "\n" } \
		/^[a-z-]+:.*## / { printf "  %smake %-10s%s %s\n", bold, $$1, plain, $$2 }' Makefile

.PHONY: demo
demo: prerequisites-demo setup ## make a sandbox, run a command in it, move a file, and clean up
	@$(PYTHON_BIN) examples/demo.py

.PHONY: test
test: setup setup-test ## check and test everything that fits into 20 minutes
	@$(PYTHON_BIN) tools/run_tests.py

# --- for daily work --------------------------------------------------------------------------------

.PHONY: setup
setup: $(VENV) $(BINARIES) ## everything but starting anything: .venv and the Go programs

.PHONY: serve
serve: setup ## start the server in the foreground
	@exec .venv/bin/opensandbox-server

.PHONY: check
check: setup $(STATICCHECK) ## formatting, lint, types, stale generated files, layout
	@$(PYTHON_BIN) tools/run_checks.py

.PHONY: format
format: setup ## format Go and Python, fix what the linter can fix
	@.venv/bin/ruff check --quiet --fix-only $(PYTHON_CODE); .venv/bin/ruff format --quiet $(PYTHON_CODE)
	@gofmt -w $$(find node tools/go bench -name '*.go')

.PHONY: generate
generate: $(VENV) ## write the types and reference pages that come from spec/ and config.py
	@$(PYTHON_BIN) tools/generate.py
	@cd node && go generate ./...

.PHONY: test-all
test-all: setup setup-test system-packages ## `make test`, and what takes longer: cgroup v2 in a virtual machine
	@$(PYTHON_BIN) tools/run_tests.py --all

.PHONY: bench
bench: setup $(COMPAT) ## the times and sizes we promise, against the floor of this machine (bench/README.md)
	@$(PYTHON_BIN) -m bench

.PHONY: build
build: setup ## wheels for x86_64 and aarch64, the Go programs inside, into dist/
	@$(PYTHON_BIN) tools/build_wheels.py

.PHONY: lock
lock: ## resolve the Python dependencies again (UPGRADE=1: to newer versions)
	@tools/lock $(if $(UPGRADE),--upgrade)

.PHONY: clean
clean: ## remove everything that the targets above made
	@rm -rf .venv .venv-compat .tools dist reports server/src/opensandbox_server/_bin
	@find . -name .git -prune -o \( -name __pycache__ -o -name .pytest_cache -o -name .mypy_cache \
		-o -name .ruff_cache -o -name .hypothesis -o -name '*.egg-info' \) -prune -exec rm -rf {} +

# --- files -----------------------------------------------------------------------------------------

# Quick and silent once everything is installed; otherwise it says what is missing before anything is built.
.PHONY: prerequisites prerequisites-demo
prerequisites:
	@tools/prerequisites
prerequisites-demo:
	@tools/prerequisites demo

# For the virtual machine of `make test-all`.
.PHONY: system-packages
system-packages:
	@tools/install-system-packages qemu-system-x86 mmdebstrap e2fsprogs

# A browser, for tests of what web pages can and cannot do; a C compiler, which Go's race detector needs.
.PHONY: setup-test test-packages
setup-test: $(COMPAT) $(STATICCHECK) test-packages
test-packages:
	@tools/install-system-packages chromium gcc libc6-dev


$(VENV): requirements-dev.txt $(PROJECTS:%=%/pyproject.toml) tools/make-venv | prerequisites
	@echo "installing Python packages into .venv"
	@tools/make-venv .venv requirements-dev.txt $(PROJECTS)
	@# Imports are most of a server's start: have their byte code written, also where the environment forbids it later.
	@env -u PYTHONDONTWRITEBYTECODE $(PYTHON_BIN) -c 'import opensandbox_server.app, opensandbox.sandbox, uvicorn, uvloop'

# The published clients get an environment of their own: they have the same package names as ours.
$(COMPAT): tests/compat/requirements.txt tools/make-venv | prerequisites
	@echo "installing the published clients into .venv-compat"
	@tools/make-venv .venv-compat tests/compat/requirements.txt

$(BINARIES): $(GO_SOURCES) tools/build-node | prerequisites
	@echo "building the Go programs ($(ARCH))"
	@tools/build-node $(ARCH) $(BIN)
	@touch $@

# A module of its own, so that node/go.mod lists only what the programs need.
$(STATICCHECK): tools/go/go.mod tools/go/go.sum | prerequisites
	@echo "building staticcheck"
	@cd tools/go && go build -buildvcs=false -o ../../$@ honnef.co/go/tools/cmd/staticcheck
	@touch $@
