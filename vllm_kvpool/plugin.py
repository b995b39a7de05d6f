"""Entry point of the `vllm.general_plugins` group: makes the class names known to vLLM."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


def register() -> None:
    """Called once in every vLLM process; a second call does nothing."""
    if "KVPoolConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "KVPoolConnector", "vllm_kvpool.connector", "KVPoolConnector"
        )
