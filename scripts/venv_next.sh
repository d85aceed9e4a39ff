#!/usr/bin/env bash
# Makes .cache/venv-0.33: the newest vLLM, without kernels, over the packages of .venv.
#
# No model runs in it, but everything of the scheduler and the connector interface imports: it is the
# lane in which a change of vLLM's interface shows before it reaches a user. It borrows .venv's
# packages through a .pth file; what stands in its own site-packages comes first.
set -euo pipefail
source "$(dirname "$0")/common.sh"

venv=.cache/venv-0.33 archive=.cache/vllm-$VLLM_NEXT_VERSION.tar.gz
[ "$(flavour)" = cpu ] || say "note: this lane borrows from .venv, which has the packages for CUDA here"
[ -f .venv/.stamp ] || die "make venv first"
stamp=$(fingerprint "$(cat .venv/.stamp-engine)" scripts/venv_next.sh requirements/vllm-next.lock)
[ "$(cat $venv/.stamp 2>/dev/null || true)" = "$stamp" ] && exit 0

scripts/vllm_source.sh "$VLLM_NEXT_VERSION" "$archive"
say "building vLLM $VLLM_NEXT_VERSION without kernels"
rm -rf "$venv"
.venv/bin/python -m venv --without-pip "$venv"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
borrowed=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# addsitedir and not a plain path, so that the .pth of the editable project is followed too.
printf 'import site; site.addsitedir(%s)\n' "'$borrowed'" >"$site/zz_borrowed.pth"
VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$VLLM_NEXT_VERSION+cpu as_pip "$venv/bin/python" -m pip install -q \
    --no-deps --no-build-isolation --ignore-installed --no-warn-script-location "$archive"
as_pip "$venv/bin/python" -m pip install -q --no-deps --ignore-installed -r requirements/vllm-next.lock
"$venv/bin/python" -c "import vllm; assert vllm.__version__.startswith('$VLLM_NEXT_VERSION'), vllm.__version__"
printf '%s\n' "$stamp" >"$venv/.stamp"
