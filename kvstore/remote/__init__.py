"""A node from elsewhere, over gRPC: the client for other services (docs/grpc.md).

    from kvstore.remote import Node, Selector

    with Node("node7:9472", ca="ca.pem", certificate="me.pem", key="me.key") as node:
        found = node.lookup(Selector(model="qwen3-8b"), tokens=[1, 2, 3])

`AsyncNode` is the same for asyncio. Importing this loads gRPC; an engine's process imports `kvstore.client`, which needs none.
"""

try:
    import google.rpc  # noqa: F401 whether it is there
    import grpc  # noqa: F401 whether it is there
except ImportError as error:
    raise ImportError(f"kvstore.remote needs gRPC: pip install 'kvstore-llm[grpc]' ({error})") from error

from kvstore.remote.calls import Operation
from kvstore.remote.errors import (
    BadRequest,
    DeadlinePassed,
    Failed,
    NodeError,
    NotAllowed,
    NotFound,
    NotKnown,
    TooBusy,
    Unreachable,
    WrongBytes,
)
from kvstore.remote.node import AsyncNode, Node
from kvstore.remote.records import Stored
from kvstore.remote.values import Caller, Lookup, Namespace, OperationState, Run, Selector

# fmt: off
__all__ = [
    "AsyncNode", "BadRequest", "Caller", "DeadlinePassed", "Failed", "Lookup", "Namespace", "Node", "NodeError", "NotAllowed",
    "NotFound", "NotKnown", "Operation", "OperationState", "Run", "Selector", "Stored", "TooBusy", "Unreachable", "WrongBytes",
]
# fmt: on
