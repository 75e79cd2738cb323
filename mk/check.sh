#!/bin/sh
# The quick part: what is run before each commit.
. "$(dirname "$0")/env.sh"

planes() {
	# The data plane is threads and fds: no async runtime may come in through a dependency.
	for crate in image policy nbd engine disk memory store transfer multicast tap agent holder; do
		tree=$(cargo tree --quiet -p "vmfork-$crate" -e normal --prefix none)
		if printf '%s\n' "$tree" | grep -q '^tokio '; then
			die "vmfork-$crate reaches tokio" "cargo tree -p vmfork-$crate -i tokio"
		fi
	done
	"$PYTHON" mk/modules.py
}

sdk() {
	(cd sdk/python && "$PYTHON" generate_sync.py --check)
	(cd sdk/python && "$PYTHON" -m pytest -q -p no:cacheprovider)
	if "$PYTHON" -c 'import mypy' 2>/dev/null; then
		(cd sdk/python && "$PYTHON" -m mypy --cache-dir "$CACHE/mypy")
	else
		echo "left out: mypy (apt-get install mypy)" >&2
	fi
	if command -v ruff >/dev/null 2>&1; then
		(cd sdk/python && ruff check --cache-dir "$CACHE/ruff")
	else
		echo "left out: ruff (not in Debian 12)" >&2
	fi
}

shell_scripts() {
	for script in mk/*.sh .ci/run crates/guest-image/src/hooks/*.sh; do
		case $(head -n 1 "$script") in
		*bash) bash -n "$script" ;;
		*) sh -n "$script" ;;
		esac
	done
	if command -v shellcheck >/dev/null 2>&1; then
		shellcheck -x -P mk mk/*.sh .ci/run crates/guest-image/src/hooks/*.sh
	else
		echo "left out: shellcheck (apt-get install shellcheck)" >&2
	fi
}

# Lock files and traces are not written by people.
spelling() { git ls-files -z -- . ':!*.lock' ':!*.trace' | xargs -0 codespell -I mk/codespell.words; }

unit() { CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$ROOT/mk/if-changed.sh tests_cargo --lib --bins; }

prose() {
	"$PYTHON" -m unittest -q mk/test_prose.py
	"$PYTHON" mk/prose.py
}

step "format" cargo fmt --all --check
step "lints and build" tests_cargo --all-targets --no-run
step "planes" planes
step "unit tests" unit
step "Python SDK" sdk
step "shell scripts" shell_scripts
step "spelling" spelling
step "prose" prose
