#!/bin/sh
# Gets the QEMU of bookworm-backports for the tests: its packages, into .cache, from where this
# machine gets its own; installed is nothing. Once there, no network is needed.
. "$(dirname "$0")/env.sh"

packages="qemu-system-x86 qemu-system-common qemu-system-data seabios"
to=$CACHE/qemu-backports
for package in $packages; do
	if ! ls "$to/$package"_*.deb >/dev/null 2>&1; then
		missing=yes
	fi
done
[ -n "${missing:-}" ] || exit 0

# shellcheck disable=SC2016 # apt's own variables
archive=$(apt-get indextargets --format '$(RELEASE) $(CODENAME) $(COMPONENT) $(IDENTIFIER) $(REPO_URI)' |
	awk '($1 == "bookworm" || $2 == "bookworm") && $3 == "main" && $4 == "Packages" { print $5; exit }')
[ -n "$archive" ] || die "apt knows no archive of bookworm" "add one to /etc/apt, or leave these tests out"

mkdir -p "$to/apt/lists/partial" "$to/apt/archives/partial"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
for suite in bookworm bookworm-backports; do
	echo "deb [signed-by=$keys] $archive $suite main"
done >"$to/apt/sources.list"
apt() {
	apt-get -qq -o Dir::Etc::SourceList="$to/apt/sources.list" -o Dir::Etc::SourceParts=- \
		-o Dir::State::Lists="$to/apt/lists" -o Dir::Cache="$to/apt" -o APT::Sandbox::User=root \
		-o Acquire::Retries=2 -t bookworm-backports "$@"
}
apt update
# Whole or not at all: what is half there counts as missing.
rm -rf "$to/apt/new"
mkdir "$to/apt/new"
# shellcheck disable=SC2086 # one argument a package
(cd "$to/apt/new" && apt download $packages)
mv "$to"/apt/new/*.deb "$to"/
rm -rf "$to/apt"
