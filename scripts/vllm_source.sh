#!/usr/bin/env bash
# Fetches vLLM's source distribution of one version and unpacks a part of it.
#
#   scripts/vllm_source.sh 0.32.0 .cache/vllm-0.32.0 tests requirements     # these directories
#   scripts/vllm_source.sh 0.33.0 .cache/vllm-0.33.0.tar.gz                 # the archive as it is
#
# Our connector is held against the tests that vLLM has for its own, and those are only in the sdist.
# An archive that is here already is not fetched again. The `vllm` package itself is never unpacked:
# it would shadow the installed one.
# pip insists on the metadata of what it downloads; with .venv's build tools, no isolation and no
# kernels (VLLM_TARGET_DEVICE=empty) that takes three seconds and needs no compiler.
set -euo pipefail
source "$(dirname "$0")/common.sh"

version=$1 target=$2
shift 2
[ -e "$target" ] && exit 0
[ -x .venv/bin/pip ] || die "make venv first"

mkdir -p .cache
staging=$(mktemp -d .cache/source-XXXXXX)
trap 'rm -rf "$staging"' EXIT
archive=.cache/vllm-$version.tar.gz
if [ ! -f "$archive" ]; then
    say "fetching the source of vLLM $version (about 45 MB)"
    archive=$staging/vllm-$version.tar.gz
    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$version as_pip .venv/bin/pip download -q \
        --no-deps --no-binary vllm --no-build-isolation --dest "$staging" "vllm==$version"
fi
if [ $# -eq 0 ]; then
    mv "$archive" "$target"
else
    tar -xzf "$archive" -C "$staging" "${@/#/vllm-$version/}" "vllm-$version/LICENSE"
    mv "$staging/vllm-$version" "$target"
fi
