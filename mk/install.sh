#!/bin/sh
# mk/install.sh [--remove]: what mk/build.sh laid out, below $DESTDIR$PREFIX. State is elsewhere,
# and stays.
. "$(dirname "$0")/env.sh"

: "${PREFIX:=/usr/local}" "${DESTDIR:=}"
# Another built tree, as for the tests.
OUT=${VMFORK_OUT:-$OUT}
case $PREFIX in
/*) ;;
*) die "PREFIX=$PREFIX is no absolute path" "the systemd unit names the program by it" ;;
esac
to=$DESTDIR$PREFIX
units=$to/lib/systemd/system
man=share/man/man3

if [ "${1:-}" = --remove ]; then
	rm -f "$to/bin/vmfork" "$to/bin/vmforkd" \
		"$units/vmforkd.service" "$units/vmfork-holder.service" \
		"$to/share/bash-completion/completions/vmfork" \
		"$to/share/zsh/site-functions/_vmfork" \
		"$to/share/fish/vendor_completions.d/vmfork.fish"
	# The calls' pages are links to vmfork.3.
	for page in "$to/$man"/*.3; do
		[ "$(readlink "$page" || true)" != vmfork.3 ] || rm -f "$page"
	done
	rm -f "$to/$man/vmfork.3"
	rm -rf "$to/lib/vmfork"
	exit 0
fi

[ -x "$OUT/bin/vmforkd" ] || die "nothing is built in $OUT" "make build"
install -d "$to/bin" "$to/lib" "$units" "$to/$man"
install -m 755 "$OUT/bin/vmfork" "$OUT/bin/vmforkd" "$to/bin/"
# Swapped in whole: what an earlier version had and this one has not must go.
rm -rf "$to/lib/vmfork.new" "$to/lib/vmfork.old"
cp -R "$OUT/lib/vmfork" "$to/lib/vmfork.new"
if [ -d "$to/lib/vmfork" ]; then mv "$to/lib/vmfork" "$to/lib/vmfork.old"; fi
mv "$to/lib/vmfork.new" "$to/lib/vmfork"
rm -rf "$to/lib/vmfork.old"

# unit NAME PROGRAM: with the program's place.
unit() {
	sed "s|^ExecStart=.*|ExecStart=$PREFIX/$2|" "packaging/$1" >"$units/$1"
	chmod 644 "$units/$1"
}
unit vmforkd.service bin/vmforkd
unit vmfork-holder.service lib/vmfork/vmfork-holder
if [ -d "$OUT/lib/vmfork/guest/usr/$man" ]; then cp -P "$OUT/lib/vmfork/guest/usr/$man"/*.3 "$to/$man/"; fi
completion() {
	install -d "$to/$(dirname "$2")"
	"$OUT/bin/vmfork" completion "$1" >"$to/$2"
	chmod 644 "$to/$2"
}
completion bash share/bash-completion/completions/vmfork
completion zsh share/zsh/site-functions/_vmfork
completion fish share/fish/vendor_completions.d/vmfork.fish
say "installed in $to"
