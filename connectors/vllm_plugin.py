"""Entry point `vllm.general_plugins`: makes the connector and the load format `kvstore` known to vLLM by their names.

vLLM runs it in every process, and sometimes twice in one; its factory refuses a name that it has already. With it,
`kv_connector_module_path` may be left out. What it raises would end every vLLM of the environment, also those that use
nothing of ours: so it raises nothing. The loader's own modules are imported where a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAME = "KVStoreConnector"
MODULE = "connectors.vllm"
LOAD_FORMAT = "kvstore"


def register() -> None:
    """Register both; calling it again changes nothing."""
    _try("the connector", _register_connector)
    _try(f"load format {LOAD_FORMAT}", _register_loader)


def _register_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError:
        pass  # registered already, by an earlier call in this process


def _register_loader() -> None:
    from vllm.model_executor import model_loader

    if LOAD_FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return  # by an earlier call in this process

    class Loader(model_loader.BaseModelLoader):
        def __new__(cls, load_config: Any) -> Any:
            from connectors.vllm.loader import KVStoreModelLoader

            return KVStoreModelLoader(load_config)

    model_loader.register_model_loader(LOAD_FORMAT)(Loader)


def _try(what: str, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - see the module's head
        import logging

        logging.getLogger("vllm.kvstore").warning(
            "kvstore: %s is not known to this vLLM by its name (%s: %s)", what, type(error).__name__, error
        )
