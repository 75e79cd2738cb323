# The front door. `make help` lists what there is; anything longer than a line is in mk/.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help demo test soak bench check setup install-deps build image install uninstall clean distclean

PREFIX ?= /usr/local
export PREFIX DESTDIR

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | awk -F'\t' '{ printf "  make %-13s %s\n", $$1, $$2 }'

demo: build ## build everything, then fork a running VM and do a real job on its clones
	@mk/demo.sh $(ARGS)

test: setup ## all tests: check, then the built programs from outside; not again what has passed unchanged
	@mk/test.sh

soak: setup ## the long tests, for hours: VMFORK_TEST_SEED=N repeats a run
	@mk/soak.sh

bench: build ## measure; writes JSON, a table and an HTML report
	@mk/bench.sh

check: setup ## quick: format, lints, unit tests
	@mk/check.sh

setup: install-deps ## install what is missing, check the toolchain
	@mk/toolchain.sh

install-deps: ## install the Debian packages that are missing (as root)
	@mk/install-deps.sh

build: setup ## programs, shim, agent and guest libraries into out/
	@mk/build.sh

image: build ## build the default guest image
	@mk/image.sh default

install: build ## programs, systemd unit, completions, man pages: PREFIX=/usr/local DESTDIR=
	@mk/install.sh

uninstall: ## remove what install put there; state stays
	@mk/install.sh --remove

clean: ## stop the daemon, remove state and everything built; downloads stay
	@mk/clean.sh

distclean: clean ## remove the downloads too
	@mk/distclean.sh
