#!/usr/bin/env bash
# Makes kvstore/v1 from proto/kvstore/v1: code and types, by pinned tools in an environment of their own (the generator
# wants an older protobuf than the one we run with, which reads what it makes).
set -euo pipefail
cd "$(dirname "$0")/.."
env=.cache/venv-proto
if [ ! -e "$env/ready" ] || [ requirements/proto.lock -nt "$env/ready" ]; then
    "${PYTHON:-python3}" -m venv --clear "$env"
    "$env/bin/pip" install -q --no-deps -r requirements/proto.lock
    touch "$env/ready"
fi
rm -f kvstore/v1/*_pb2*
PATH="$PWD/$env/bin:$PATH" "$env/bin/python" -m grpc_tools.protoc -Iproto --python_out=. --grpc_python_out=. \
    --mypy_out=quiet:. --mypy_grpc_out=quiet:. proto/kvstore/v1/*.proto
# A file without services has nothing of gRPC.
rm -f kvstore/v1/types_pb2_grpc.py kvstore/v1/types_pb2_grpc.pyi
