"""Entry point `vllm.general_plugins`: makes the connector known to vLLM by name.

vLLM runs it in every process, and sometimes twice in one; its factory refuses a name that it
has already, so that is asked first. With it, `kv_connector_module_path` may be left out.
"""

from __future__ import annotations

NAME = "KVStoreConnector"
MODULE = "connectors.vllm"


def register() -> None:
    """Register the connector; calling it again changes nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError:
        pass  # registered already, by an earlier call in this process
