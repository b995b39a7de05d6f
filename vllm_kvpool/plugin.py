"""Entry point of the `vllm.general_plugins` group: registers the connectors with vLLM."""

import logging

from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from vllm_kvpool.vllm_adapt import compat


def log_as_vllm() -> None:
    """Log with vLLM's handlers, format and level.

    Called again when a connector starts: vLLM may configure logging after it has loaded plugins.
    """
    ours, theirs = logging.getLogger("vllm_kvpool"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers, ours.propagate = theirs.handlers, False
        ours.setLevel(theirs.level)


def register() -> None:
    """Register both connectors. vLLM calls it in each process; a second call does nothing."""
    log_as_vllm()
    compat.refuse_missing_embeddings("KVPoolConnector")
    if "KVPoolConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "KVPoolConnector", "vllm_kvpool.connector", "KVPoolConnector"
        )
    if "KVPoolECConnector" not in ECConnectorFactory._registry:
        ECConnectorFactory.register_connector(
            "KVPoolECConnector", "vllm_kvpool.embeds.connector", "KVPoolECConnector"
        )
