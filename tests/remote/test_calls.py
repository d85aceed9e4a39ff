"""What a call is for who asks: values in, values out, an error for each case, repeated where it may be."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2

from kvstore import remote
from kvstore.errors import KvstoreError
from kvstore.remote import Namespace, NodeError, OperationState, Run, Selector
from kvstore.remote.places import ATTEMPTS_MAX, METHODS, NOT_REPEATED, service_config
from kvstore.tools.rpc.calls import snake
from kvstore.v1 import cache_pb2, models_pb2, nodes_pb2, reports_pb2, types_pb2
from tests.remote.servicer import Asked, Servicer, ended, serving

Operation = types_pb2.Operation
SPACE = Namespace(bytes(16), 64, 8, 16, {"model": "m", "tenant": ""}, (48, 16))


@pytest.fixture(params=["threads", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
def node(kind: str, servicer: Servicer) -> Iterator[Asked]:
    with serving(servicer) as port:
        asked = Asked(kind, f"127.0.0.1:{port}", timeout_s=20)
        yield asked
        asked.close()


def failing(code: grpc.StatusCode, reason: str = "", retry_s: float = 0.0, times: int = 1 << 30) -> Any:
    """An answer that fails so often, and then is empty."""
    left = [times]

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        left[0] -= 1
        if left[0] < 0:
            return b""
        status = status_pb2.Status(code=code.value[0], message="no")
        for detail in (
            error_details_pb2.ErrorInfo(reason=reason, domain="kvstore"),
            error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=int(retry_s * 1e9))),
        )[: 1 + bool(retry_s)]:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        if reason:
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        return context.abort(code, "no")

    return answer


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, remote.NotKnown),
        (grpc.StatusCode.PERMISSION_DENIED, remote.NotAllowed),
        (grpc.StatusCode.NOT_FOUND, remote.NotFound),
        (grpc.StatusCode.INVALID_ARGUMENT, remote.BadRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, remote.TooBusy),
        (grpc.StatusCode.FAILED_PRECONDITION, remote.Failed),
        (grpc.StatusCode.INTERNAL, remote.Failed),
    ],
)
def test_each_case_has_a_class(
    node: Asked, servicer: Servicer, code: grpc.StatusCode, error: type[NodeError]
) -> None:
    """A status is raised as the class of its case, with the node's reason and when to come again."""
    servicer.answers["CacheService/Pin"] = failing(code, "BECAUSE", retry_s=0.5)
    with pytest.raises(KvstoreError) as raised:
        node.pin("", b"h")
    assert type(raised.value) is error
    assert isinstance(raised.value, NodeError)
    assert (str(raised.value), raised.value.reason, raised.value.retry_after_s) == ("no", "BECAUSE", 0.5)
    assert servicer.calls == ["CacheService/Pin"], "it was repeated"


def test_what_may_be_repeated_is(node: Asked, servicer: Servicer) -> None:
    """Where nobody answers, a call is repeated as often as it may be; one that would do something twice is not."""
    servicer.answers |= {
        "CacheService/Pin": failing(grpc.StatusCode.UNAVAILABLE, times=2),
        "NodeService/ChangeSetting": failing(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
    }
    assert node.pin("", b"h") == ()
    assert servicer.calls == 3 * ["CacheService/Pin"]
    with pytest.raises(remote.Unreachable, match=r"127\.0\.0\.1:\d+: no"):
        node.change_setting("log.level", "debug")
    assert servicer.calls[3:] == ["NodeService/ChangeSetting"]
    taking = {"Erase", "UnloadModel", "EvictModel", "CancelWarming", "CancelErasure"}
    assert taking < NOT_REPEATED  # the second time there is nothing any more, and that is what it would say
    assert ATTEMPTS_MAX == 5  # more gRPC does not do
    assert {name.partition("/")[2] for name in METHODS} > NOT_REPEATED
    (policy,) = json.loads(service_config())["methodConfig"]
    streams = {method.name for method in METHODS.values() if method.server_streaming}
    assert not streams & {one["method"] for one in policy["name"]}  # a killed node would be waited for


def test_every_call_has_a_deadline(node: Asked, servicer: Servicer) -> None:
    """What does not answer in time is ended, by the call's own time, and the node knows it."""
    left: list[float] = []
    gone = threading.Event()

    def slow(request: Any, context: grpc.ServicerContext) -> Any:
        left.append(context.time_remaining())
        context.add_callback(gone.set)
        gone.wait(30)
        return b""

    servicer.answers["CacheService/Pin"] = slow
    with pytest.raises(remote.DeadlinePassed):
        node.of(lambda: node.node.within(0.3).pin("", b"h"))
    assert 0 < left[0] <= 0.3
    assert gone.wait(10)


def test_values_in_and_out(node: Asked, servicer: Servicer) -> None:
    """Fields are plain values, in order or by name; answers are structs, documents, or the only field that they have."""
    seen: list[Any] = []

    def answer(message: Any) -> Any:
        return lambda request, context: seen.append(request) or message

    space = types_pb2.Namespace(
        digest=bytes(16), record_bytes=64, hash_bytes=8, block_tokens=16, fields={"model": "m", "tenant": ""}, columns=(48, 16)
    )  # fmt: skip
    runs = [types_pb2.Run(blocks=2, tier=types_pb2.TIER_NVME, outcome="hit_nvme"), types_pb2.Run(blocks=1, outcome="never_stored")]  # fmt: skip
    servicer.answers |= {
        "CacheService/Lookup": answer(
            cache_pb2.LookupResponse(blocks=3, held_blocks=2, runs=runs, predicted_load_s=0.5)
        ),
        "CacheService/SetQuota": answer(cache_pb2.SetQuotaResponse(namespaces=["ab"])),
        "CacheService/Erase": answer(cache_pb2.EraseResponse(blocks=3, document_json='{"blocks": 3}')),
        "CacheService/ListNamespaces": lambda request, context: cache_pb2.ListNamespacesResponse(
            namespaces=[space], more=request.skip < 2
        ),
        "ReportService/GetReport": answer(reports_pb2.GetReportResponse(document_json="{}")),
        "NodeService/GetPrincipal": answer(nodes_pb2.GetPrincipalResponse(name="me", may=["read"])),
        "ModelService/PinModel": answer(models_pb2.PinModelResponse()),
    }
    found = node.lookup(Selector(model="m", tenant=""), tokens=[1, 2], cache_salt="salt")
    assert (found.held_blocks, found.runs) == (2, (Run(2, "nvme", "hit_nvme"), Run(1, "", "never_stored")))
    assert seen[-1].namespace.HasField("tenant") and list(seen[-1].tokens.ids) == [1, 2]
    node.lookup(SPACE, [b"12345678", b"abcdefgh"])
    assert seen[-1].blocks.hashes == b"12345678abcdefgh" and seen[-1].namespace.digest == bytes(16).hex()
    assert node.set_quota("3fa2", dram_bytes=-1, nvme_bytes=None) == ("ab",)
    assert seen[-1].dram_bytes == -1 and not seen[-1].HasField("nvme_bytes")
    assert node.erase(scope={"hash": b"h", "namespace": "3fa2", "tenant": None}) == {"blocks": 3}
    assert seen[-1].scope.namespace.digest == "3fa2" and not seen[-1].scope.HasField("tenant")
    assert node.namespaces() == [SPACE, SPACE, SPACE]
    assert node.report(1.5) == {} and seen[-1].since.ToMilliseconds() == 1500
    node.report()
    assert not seen[-1].HasField("since")
    assert node.caller() == remote.Caller("me", ("read",), None)
    assert node.pin_model("qwen") is None and seen[-1].model == "qwen"


def test_wrong_values_are_refused_before_they_are_sent(node: Asked, servicer: Servicer) -> None:
    """A field that there is not, a value of another type, a field twice: one line says so."""
    for wrong in (
        lambda: node.pin("", b"h", surprise=1),
        lambda: node.pin("", b"h", hash=b"h"),
        lambda: node.pin("", b"h", 3),
        lambda: node.lookup("", tokens=[-1]),
        lambda: node.set_quota("", dram_bytes="many"),
    ):
        with pytest.raises(remote.BadRequest) as raised:
            wrong()
        assert "\n" not in str(raised.value)
    assert servicer.calls == []


@pytest.mark.parametrize("address", ["", "node", "node:0", "node:70000", "::1:80", "http://node:1", "a b:1"])
def test_an_address_is_host_and_port(address: str) -> None:
    """Anything else is refused at once."""
    with pytest.raises(remote.BadRequest, match="HOST:PORT"):
        remote.Node(address)


def test_no_token_travels_in_the_open(tmp_path: Path) -> None:
    """Without certificates there is no TLS on this machine only: to another one there is, with the system's authorities."""
    assert all(remote.Node(f"{host}:1").where.is_plain for host in ("127.0.0.1", "localhost", "[::1]"))
    assert not remote.Node("10.0.0.7:1", token_file=tmp_path / "token").where.is_plain
    assert not remote.Node("127.0.0.1.example.org:1").where.is_plain
    assert not remote.Node("127.0.0.1:1", ca=tmp_path / "ca").where.is_plain
    with pytest.raises(remote.BadRequest, match="both or none"):
        remote.Node("node:1", certificate=tmp_path / "c")


def test_a_token_is_read_again(kind: str, servicer: Servicer, tmp_path: Path) -> None:
    """Each call has the token that is in the file now; without a file, or a token in it, nothing is asked."""
    servicer.answers["ModelService/PinModel"] = lambda request, context: b""
    file = tmp_path / "token"
    with serving(servicer) as port:
        node = Asked(kind, f"127.0.0.1:{port}", token_file=file)
        with pytest.raises(remote.NotKnown, match="token: cannot be read; nothing was asked"):
            node.pin_model("m")
        for token in ("first", "second"):
            (tmp_path / "new").write_text(f"{token}\n")
            (tmp_path / "new").replace(file)
            node.pin_model("m")
        for empty in ("", "two words", "ünicode"):
            file.write_text(empty)
            with pytest.raises(remote.NotKnown, match="no token in it") as raised:
                node.pin_model("m")
            assert "words" not in str(raised.value)
        node.close()
    assert servicer.tokens == ["Bearer first", "Bearer second"]
    assert len(servicer.calls) == 2


def test_what_a_command_of_the_node_answers_has_time(node: Asked, servicer: Servicer) -> None:
    """It goes to a bucket, which may hang for longer than most calls have: what is said of the others would be lost."""
    commands = {m.name: m.output_type for m in METHODS.values() if m.containing_service.name in ("ModelService", "RegionService")}  # fmt: skip
    begun = {name for name, kind in commands.items() if "operation" in kind.fields_by_name}
    left_s: list[float] = []
    for name in commands.keys() - begun - {"UnloadModel"}:  # that asks the daemon

        def answer(request: Any, context: grpc.ServicerContext, kind: Any = commands[name]) -> Any:
            left_s.append(context.time_remaining())
            return GetMessageClass(kind)(**dict.fromkeys(kind.fields_by_name, "{}"))

        servicer.answers[next(method for method in METHODS if method.endswith(f"/{name}"))] = answer
        timed = node.node.within(None)
        node.of(getattr(timed, snake(name)))
    assert len(left_s) == len(commands) - len(begun) - 1 and min(left_s) > 60


def test_a_watch_that_brings_nothing_is_over_at_its_deadline(node: Asked, servicer: Servicer) -> None:
    """A node whose daemon hangs has nothing to say: who watches hears so, and does not wait for ever."""
    gone = threading.Event()

    def nothing(request: Any, context: grpc.ServicerContext) -> Any:
        context.add_callback(gone.set)
        gone.wait(30)
        yield from ()

    servicer.answers["ReportService/WatchFigures"] = nothing
    with pytest.raises(remote.DeadlinePassed):
        node.of(lambda: node.node.within(0.3).watch_figures())
    assert servicer.calls == ["ReportService/WatchFigures"]


def _operation(state: int, **facts: Any) -> nodes_pb2.WatchOperationResponse:
    return nodes_pb2.WatchOperationResponse(operation=Operation(id="7", state=state, **facts))


def test_operations_are_watched_to_their_end(node: Asked, servicer: Servicer) -> None:
    """A watch that breaks is begun anew; the end brings the document, or what went wrong."""
    streams = iter([[_operation(Operation.STATE_RUNNING, progress="1 of 2")], [_operation(Operation.STATE_DONE, document_json='{"bytes": 9}')]])  # fmt: skip

    def watch(request: Any, context: grpc.ServicerContext) -> Any:
        assert request.id == "7"
        yield from next(streams)

    begun = models_pb2.PreloadModelResponse(operation=Operation(id="7", state=Operation.STATE_RUNNING))
    servicer.answers |= {
        "ModelService/PreloadModel": lambda request, context: begun,
        "NodeService/WatchOperation": watch,
        "NodeService/CancelOperation": lambda request, context: nodes_pb2.CancelOperationResponse(
            operation=Operation(id=request.id, state=Operation.STATE_CANCELLED)
        ),
    }
    operation = node.preload_model("qwen")
    states: list[OperationState] = ended(node, operation, "watch")
    assert [(one.state, one.progress) for one in states] == [("running", "1 of 2"), ("done", "")]
    assert states[-1].document == {"bytes": 9} and operation.state == states[-1]
    assert ended(node, operation, "cancel").state == "cancelled"
    streams = iter([[_operation(Operation.STATE_FAILED, problem="disk full", exit_code=1)]])
    with pytest.raises(remote.Failed, match="disk full"):
        ended(node, operation, "result")


def test_a_node_that_restarts_costs_a_wait(kind: str, servicer: Servicer) -> None:
    """Calls under way and calls while nobody listens succeed once somebody listens there again."""
    servicer.answers["ModelService/PinModel"] = lambda request, context: b""
    with serving(servicer) as port:
        node = Asked(kind, f"127.0.0.1:{port}")
        node.pin_model("m")
    begun_s = time.monotonic()
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            node.pin_model("m")
        except NodeError as error:
            failed.append(error)

    asking = [threading.Thread(target=ask) for _ in range(8)]
    for thread in asking:
        thread.start()
    while time.monotonic() - begun_s < 1.0:  # nobody is there for so long
        time.sleep(0.05)
    with serving(servicer, port):
        for thread in asking:
            thread.join(30)
        node.close()
    assert not failed, failed
    assert servicer.calls.count("ModelService/PinModel") == 9


def test_a_closed_node_says_so(kind: str, servicer: Servicer) -> None:
    """After close a call connects anew; a call of a channel that gRPC closed is no traceback."""
    servicer.answers["ModelService/PinModel"] = lambda request, context: b""
    with serving(servicer) as port:
        node = Asked(kind, f"127.0.0.1:{port}")
        for _ in range(2):
            node.pin_model("m")
            node.of(node.node.close)
        assert len(servicer.calls) == 2
        node.close()
