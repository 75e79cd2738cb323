#!/bin/sh
# Installs what is missing of mk/packages. With all there it does nothing and needs no network;
# downloads are kept in .cache/apt, so that a reinstalled machine needs little.
. "$(dirname "$0")/env.sh"

missing=
while read -r package _; do
	case $package in '' | '#'*) continue ;; esac
	status=$(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null || true)
	case $status in
	ii*) ;;
	*) missing="$missing $package" ;;
	esac
done <mk/packages
[ -n "$missing" ] || exit 0

say "installing Debian packages:$missing"
[ "$(id -u)" = 0 ] || die "packages are missing:$missing" "run it as root, or install them: apt-get install$missing"
command -v apt-get >/dev/null || die "this is no Debian" "install by your system's means:$missing"

mkdir -p "$CACHE/apt/partial"
install_missing() {
	# Word splitting is wanted: one argument per package.
	# shellcheck disable=SC2086
	DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
		-o Dir::Cache::archives="$CACHE/apt" -o APT::Keep-Downloaded-Packages=true \
		-o APT::Sandbox::User=root -o Acquire::Retries=2 "$@" $missing
}
# With an index and a full cache no network is asked for.
if ! install_missing --no-download -qq >/dev/null 2>&1; then
	apt-get update || die "the package index cannot be read" "check the network and /etc/apt"
	install_missing || die "not all packages could be installed" "read apt's words above"
fi
