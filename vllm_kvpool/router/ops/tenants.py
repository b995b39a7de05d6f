"""Limits of tenants: their models, their rates, their requests at a time (pure).

Owned by the loop of the clients' address. Keys are compared by their digests, so a file may hold
digests alone. Limits are those of one router: a second one beside it counts for itself.
"""

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_kvpool.router.config import TenantConfig
from vllm_kvpool.router.dataplane.headers import bearer_token


class Denied(Exception):
    """A request that is not served: an HTTP status, and what to change."""

    def __init__(self, status: int, why: str, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Tenant:
    """A tenant's limits, and its use of them."""

    config: TenantConfig
    tokens: float
    """Sequences that it may begin now: a bucket that fills at its rate. One request of several may
    take more than there are; then it is below 0, and fills first."""
    filled_at: float
    num_running: int = 0
    """Sequences."""

    def leave(self, num_sequences: int) -> None:
        """End a request that `Tenants.enter` has begun."""
        self.num_running -= num_sequences


class Tenants:
    """The tenants by their keys: `of` finds one, `enter` and `Tenant.leave` count its requests."""

    def __init__(
        self,
        read: Callable[[], Iterable[TenantConfig]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the tenants by `read`, which may raise ConfigError; so does `reload`."""
        self._read = read
        self._clock = clock
        self._by_digest: dict[str, Tenant] = {}
        self._by_name: dict[str, Tenant] = {}
        self.reload()

    def reload(self) -> None:
        """Read the tenants again; after ConfigError nothing has changed. Running requests count."""
        configs = self._read()
        before, now = self._by_name, self._clock()
        self._by_digest, self._by_name = {}, {}
        for config in configs:
            tenant = before.get(config.name) or Tenant(config, config.burst, now)
            tenant.config, tenant.tokens = config, min(tenant.tokens, config.burst)
            self._by_digest[config.key_digest] = self._by_name[config.name] = tenant

    def of(self, authorization: str | None) -> Tenant:
        """Return the tenant of a key. Raises Denied with 401."""
        key = bearer_token(authorization or "")
        if key is None:
            raise Denied(401, "A key is needed: send `Authorization: Bearer KEY`.")
        tenant = self._by_digest.get(hashlib.sha256(key.encode(errors="replace")).hexdigest())
        if tenant is None:
            raise Denied(401, "The key is not one of the router's (front.keys_file).")
        return tenant

    def may_use(self, tenant: Tenant, model: str) -> bool:
        """Return True if the tenant may use the model; a list of models limits it, by name."""
        return not tenant.config.models or model in tenant.config.models

    def enter(self, tenant: Tenant, model: str, num_sequences: int = 1) -> None:
        """Begin a request, to be followed by `leave`; Denied with 400, 403 or 429."""
        config, now = tenant.config, self._clock()
        if not self.may_use(tenant, model):
            why = f"{config.name} may not use the model {model!r}, only {', '.join(config.models)}."
            raise Denied(403, why)
        most = config.max_running
        if most and num_sequences > most:
            why = f"The request has {num_sequences} sequences (prompts times `n`); {config.name} "
            raise Denied(400, why + f"may have {most} (max_running).")
        if most and tenant.num_running + num_sequences > most:
            why = f"{config.name} has {tenant.num_running} sequences running and may have {most}"
            raise Denied(429, why + " (max_running).", 1.0)
        if config.requests_per_s:
            gained = (now - tenant.filled_at) * config.requests_per_s
            tenant.tokens, tenant.filled_at = min(config.burst, tenant.tokens + gained), now
            if tenant.tokens < 1:
                wait_s = (1 - tenant.tokens) / config.requests_per_s
                why = f"{config.name} sends more than {config.requests_per_s:g} sequences a second "
                raise Denied(429, why + "(requests_per_s).", wait_s)
            tenant.tokens -= num_sequences
        tenant.num_running += num_sequences


class TenantSalts:
    """A `cache_salt` of its own for each tenant, which nobody without the secret can compute."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def of(self, tenant: str, given: str) -> str:
        """Return the salt of a tenant's request that brings `given` itself; "": it brings none.

        64 hexadecimal digits. JSON keeps the two names apart, whatever they are made of.
        """
        message = b"cache_salt" + json.dumps([tenant, given]).encode()
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()
