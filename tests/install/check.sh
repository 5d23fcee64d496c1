#!/bin/sh
# Installs a build to a folder of its own, then builds and runs a project that knows nothing but that folder.
# usage: check.sh BUILD_DIR
set -eu
[ $# -eq 1 ] || { echo "usage: check.sh BUILD_DIR" >&2; exit 2; }
build=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT INT TERM

quietly() { "$@" >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; exit 1; }; }

quietly cmake --install "$build" --prefix "$scratch/prefix"
# The package must not lean on the tree that it was built from.
if grep -rlE "$build|$(cd "$here/../.." && pwd)/" "$scratch/prefix" --include='*.cmake' --include='*.h*'; then
    echo "the files above name the source or build tree" >&2
    exit 1
fi
quietly cmake -G Ninja -S "$here" -B "$scratch/build" -DCMAKE_PREFIX_PATH="$scratch/prefix" -DCMAKE_BUILD_TYPE=Release
quietly cmake --build "$scratch/build"
"$scratch/build/consumer"
"$scratch/build/consumer_c"
