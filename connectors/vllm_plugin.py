"""Entry point `vllm.general_plugins`: makes the connector known to vLLM by name.

vLLM runs it in every process, and sometimes twice in one; its factory refuses a name that it has already. With it,
`kv_connector_module_path` may be left out. What it raises would end every vLLM of the environment, also those that use
no connector: so it raises nothing.
"""

from __future__ import annotations

NAME = "KVStoreConnector"
MODULE = "connectors.vllm"


def register() -> None:
    """Register the connector; calling it again changes nothing."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError:
        pass  # registered already, by an earlier call in this process
    except Exception as error:  # noqa: BLE001 - see the module's head
        import logging

        logging.getLogger("vllm.kvstore").warning(
            "kvstore: the connector is not known to this vLLM by its name (%s: %s)",
            type(error).__name__,
            error,
        )
