# Each target calls a script in contrib or a plain go command. Scripts that run as root install missing
# packages. `make help` lists the targets.

# Go older than go.mod requires takes this toolchain, as in contrib/lib.sh.
export GOTOOLCHAIN ?= go1.27.3

PKG ?= ./...
RUN ?= .
MINUTES ?= 1
MACHINE := $(CURDIR)/contrib/machine

.PHONY: all help build unit integration test test-all lint fix guest fuzz bench demo reproducible deb rpm tarball release clean

all: build

help: ## List the targets
	@grep -hE '^[a-z -]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

build: ## Build bin/berthd, berth, berth-shim, berth-unpack, berth-verify, berth-net, berth-task and berth-stream
	contrib/build

unit: ## Run unit tests without root: make unit PKG=./image/...
	go test -tags seccomp $(PKG)

integration: build ## Run integration tests by name, as root: make integration RUN=TestPodLifecycle
	BERTH_TEST_ALL=1 BERTH_BIN=$(CURDIR)/bin go test -v -tags seccomp -exec $(MACHINE) -run '$(RUN)' ./integration

test: ## Run the default tests, as root, in 20 minutes
	contrib/test

test-all: ## Run every test, as root, in about two hours
	contrib/test -all

lint: ## Check style: go vet, golangci-lint, clang-format, shellcheck
	contrib/lint

fix: ## Correct style where the linters can
	contrib/lint -fix

guest: ## Run the smoke test in a guest with cgroup v2, systemd and AppArmor, as root
	contrib/guest -smoke systemd

fuzz: ## Run each fuzz target for a while, as root: make fuzz MINUTES=5 PKG=./image/registry
	contrib/fuzz $(MINUTES) $(PKG)

bench: ## Measure berth beside containerd, as root, in 20 minutes
	contrib/bench

demo: ## Start a pod on this machine, as root
	contrib/demo

reproducible: ## Build twice in different directories and compare the programs
	contrib/build -check

deb rpm tarball: ## Build packages into dist: make deb rpm tarball
	contrib/package $@

KEY ?= berth.key

release: ## Build and sign a release into dist, as root: make release KEY=secret.key
	contrib/release -key $(KEY)

clean: ## Remove what was built
	rm -rf bin dist
