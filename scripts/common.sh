# Shared by the scripts in this directory; sourced, never run.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

VLLM_VERSION=0.32.0
VLLM_NEXT_VERSION=0.33.0
TORCH_PIN="torch==2.13.0+cpu"
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# python_checked: prints the interpreter to use, or stops with one line.
python_checked() {
    local python=${PYTHON:-python3} version
    command -v "$python" >/dev/null || die "no $python found: install Python 3.11 or newer, or set PYTHON=/path/to/python"
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || die "$python does not run"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "Python 3.11 or newer is needed and $python is $version: set PYTHON=/path/to/python3.11"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python cannot make virtual environments: on Debian, apt-get install python3-venv"
    printf '%s\n' "$python"
}

# flavour: cuda where an NVIDIA GPU answers, else cpu.
flavour() {
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then echo cuda; else echo cpu; fi
}

# fingerprint TEXT FILE…: changes when an input of an installation changes.
fingerprint() {
    local text=$1
    shift
    { printf '%s\n' "$text"; sha256sum "$@"; } | sha256sum | cut -d' ' -f1
}

# as_pip PIP ARGS…: quiet about everything but errors. Nothing is compiled before it is imported: that is half of the installation's
# work, and most of it is never imported. (0 is how a setting says --no-compile.)
as_pip() {
    local pip=$1
    shift
    PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=0 "$pip" "$@"
}
