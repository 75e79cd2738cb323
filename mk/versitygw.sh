#!/bin/sh
# Gets versitygw, an S3 server, for the tests of crates/store-s3: built from source into .cache,
# installed is nothing. Once there, no network is needed. Without Go or a network it says so, and
# those tests are left out.
. "$(dirname "$0")/env.sh"

# What the tests were written against. The folder has the version, so that another one is built
# again.
version=v1.8.0
to=$CACHE/versitygw-$version
[ ! -x "$to/versitygw" ] || exit 0

left_out() {
	printf 'left out: versitygw, so the tests against a real S3 server too: %s\n' "$1" >&2
	exit 0
}

PATH=$PATH:/usr/local/go/bin
command -v go >/dev/null 2>&1 || left_out "no Go (apt-get install golang-go, or https://go.dev/dl)"
# Whole or not at all: go writes the program last, into a folder that is renamed then.
rm -rf "$to.new"
mkdir -p "$to.new"
# What is only needed to build it goes again, and nothing of it is left in the home folder.
GOBIN=$to.new GOPATH=$to.new/go GOCACHE=$to.new/build GOFLAGS='-trimpath -modcacherw' go install "github.com/versity/versitygw/cmd/versitygw@$version" ||
	left_out "it can't be built; the Go proxy may be out of reach"
rm -rf "$to" "$to.new/go" "$to.new/build"
mv "$to.new" "$to"
