# make demo    builds and shows the engine at work; make test runs everything that a change has to pass.
# Both need Go alone; the tests of the Python side want python3 and the race detector a C compiler. Without them these two
# steps say that they were left out, and fail when CI is set.

SHELL         := /bin/bash
.SHELLFLAGS   := -euo pipefail -c
.DEFAULT_GOAL := build
.NOTPARALLEL:
MAKEFLAGS     += --no-print-directory

GO          ?= go
PYTHON      ?= python3
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
ARCHES      := amd64 arm64

# Rounds of the crash test; time of each fuzz target.
ROUNDS   ?= 200
FUZZTIME ?= 5s
# Names of scenarios (adapter/e2e/run.py --list), none for all; flags of the matrix, such as --releases 0.32.0 --models dense.
SCENARIOS ?=
MATRIX    ?=
# Of the tester of promises; how long it may look for a planted mistake.
FOR      ?= 30m
WITHIN   ?= 2m

# The tag leaves out the part of the command-line library that writes manuals, and two modules with it.
VERSION    ?= $(shell git describe --tags --dirty 2>/dev/null || echo "0.1.0-dev+$$(git describe --always --dirty 2>/dev/null || echo unknown)")
BUILDFLAGS := -trimpath -tags urfave_cli_no_docs -ldflags "-s -w -X main.version=$(VERSION)"

# Where git refuses to read the repository (another owner), go would refuse to build.
ifneq ($(shell git rev-parse HEAD >/dev/null 2>&1 && echo yes),yes)
export GOFLAGS := $(GOFLAGS) -buildvcs=false
endif

.PHONY: build demo test crash promises mutants e2e e2e-matrix e2e-short bench fuzz fmt release clean help
.PHONY: check-fmt check-vet check-static check-unit check-race check-python check-fuzz

help: ## list what there is to make
	@grep -hE '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 12

build: ## the static binary ./kvlift, for this machine
	CGO_ENABLED=0 $(GO) build $(BUILDFLAGS) -o kvlift .

demo: build ## see the engine do its job on real requests; under a minute
	./kvlift bench demo

test: ## everything that a change has to pass; about fifteen minutes on two cores
	@start=$$SECONDS; \
	for step in check-fmt check-vet check-static check-unit check-race check-python check-fuzz release crash promises mutants; do \
		at=$$SECONDS; printf '\n== %s\n' "$$step"; \
		$(MAKE) $$step ROUNDS=$(if $(filter command line environment,$(origin ROUNDS)),$(ROUNDS),20) FOR=$(if $(filter command line environment,$(origin FOR)),$(FOR),2m) || { printf '\n== %s FAILED\n' "$$step"; exit 1; }; \
		printf '== %s passed in %ds\n' "$$step" "$$((SECONDS-at))"; \
	done; \
	printf '\n== all passed in %ds\n' "$$((SECONDS-start))"

check-fmt:
	@bad=$$(gofmt -l .); \
	if [ -n "$$bad" ]; then echo "not formatted (make fmt):"; echo "$$bad"; exit 1; fi

check-vet:
	$(GO) vet ./...

check-static:
	$(GO) run $(STATICCHECK) ./...

check-unit:
	$(GO) test -timeout 10m ./...

check-race:
	@if command -v "$$($(GO) env CC)" >/dev/null; then \
		echo '$(GO) test -race -short -timeout 15m ./...'; CGO_ENABLED=1 $(GO) test -race -short -timeout 15m ./...; \
	elif [ -n "$${CI:-}" ]; then echo "the race detector needs a C compiler"; exit 1; \
	else echo "LEFT OUT: the race detector needs a C compiler ($$($(GO) env CC))"; fi

check-python: build
	@if command -v $(PYTHON) >/dev/null; then \
		echo '$(PYTHON) -m unittest discover -s adapter/tests'; PYTHONDONTWRITEBYTECODE=1 $(PYTHON) -m unittest discover -s adapter/tests; \
	elif [ -n "$${CI:-}" ]; then echo "the tests of the Python side need $(PYTHON)"; exit 1; \
	else echo "LEFT OUT: the tests of the Python side need $(PYTHON)"; fi

check-fuzz: fuzz

# Before Go 1.27 the end of the time may itself be reported as a failure (golang/go#75804): without an input it is none.
fuzz: ## every fuzz target for FUZZTIME each
	@grep -rHoE '^func Fuzz[A-Za-z0-9_]+' --include='*_test.go' . | sort | while IFS=: read -r file name; do \
		name=$${name#func }; echo "$$(dirname $$file) $$name"; \
		out=$$($(GO) test -timeout 10m -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) "$$(dirname $$file)" 2>&1 </dev/null) && continue; \
		if grep -q '^ *context deadline exceeded$$' <<<"$$out" && ! grep -qE 'Failing input|panic|_test\.go:[0-9]+:' <<<"$$out"; then continue; fi; \
		echo "$$out"; exit 1; \
	done

crash: ## SIGKILL daemon and engines at random, ROUNDS times
	$(GO) test ./crash -run TestCrash -count=1 -timeout 60m -args -rounds=$(ROUNDS)

promises: ## play random rounds against every promise, for FOR (30m; in make test 2m)
	$(GO) test ./server -run 'TestPromises$$' -count=1 -v -timeout 0 -args -promises-for=$(FOR)

mutants: ## plant each mistake of the protocol's model; the tester must find it within WITHIN
	$(GO) test ./mutants -count=1 -v -timeout 0 -args -within=$(WITHIN)

# The environment lies outside of the clone (adapter/e2e/environment.py says where) and is made when it is missing: pip loads 3 GB.
E2E = $$($(PYTHON) adapter/e2e/environment.py) adapter/e2e/run.py

e2e: build ## a real vLLM against a real daemon, without a GPU; installs vLLM for CPUs first, 3 GB
	$(E2E) $(SCENARIOS)

e2e-matrix: build ## every release of vLLM that is supported, with every kind of model, on one rank and on two
	$(E2E) --matrix $(MATRIX)

# Where the environment is missing, KVLIFT_E2E=require installs it; without that this step says that it was left out.
e2e-short: build ## the part of e2e that takes a minute, where its environment is there
	@if [ "$${KVLIFT_E2E:-}" = require ] || $(PYTHON) adapter/e2e/environment.py --look; then $(E2E) --short; \
	else echo "LEFT OUT: no vLLM is installed for the end-to-end tests: make e2e installs it, KVLIFT_E2E=require makes this step do so"; fi

bench: build ## what the daemon costs per key, on this machine
	./kvlift bench engine

release: ## static binaries of all architectures in dist/, with their checksums
	@rm -rf dist; mkdir dist
	@for arch in $(ARCHES); do \
		echo "dist/kvlift-linux-$$arch $(VERSION)"; \
		CGO_ENABLED=0 GOOS=linux GOARCH=$$arch $(GO) build $(BUILDFLAGS) -o dist/kvlift-linux-$$arch .; \
	done
	@$(GO) run ./packaging/checkstatic dist/kvlift-linux-*
	@cd dist && sha256sum kvlift-linux-* > SHA256SUMS && cat SHA256SUMS

fmt: ## format the Go files
	gofmt -w .

clean: ## remove what was built
	rm -rf kvlift dist
