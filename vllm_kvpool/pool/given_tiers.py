"""From the configuration to its tiers; reads the environment and Mooncake's own file."""

from vllm_kvpool.config import KVPoolConfig, default_store_url, environment, json_named_by
from vllm_kvpool.store.open import MOONCAKE_CONFIG_ENV, names_no_master
from vllm_kvpool.store.tiers import TierSpecs, parse_tiers


def tier_specs(config: KVPoolConfig) -> TierSpecs:
    """The tiers that the configuration names, or the default one."""
    urls = tuple(url or default_store_url() for url in config.store_urls)
    nameless = any(names_no_master(url) for url in urls)
    mooncake_config = json_named_by(MOONCAKE_CONFIG_ENV) if nameless else None
    return parse_tiers(urls, mooncake_config, environment())
