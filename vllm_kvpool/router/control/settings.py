"""Settings of the controller: sections of the router's file (values only)."""

import msgspec

from vllm_kvpool.router.control.events import Mode


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the router's file."""


class FlowConfig(Section, frozen=True, kw_only=True):
    """Limits of a replica's work, and of prompts that are computed apart."""

    prefill_tokens: int = 16_384
    """Uncached prompt tokens in flight at one replica, unless it is a single prompt."""
    decode_requests: int = 256
    """Sequences of one decoder at a time, and the most of one request."""
    headroom: float = 0.95
    """Share of a decoder's blocks that may be committed."""
    max_attempts: int = 4
    """Replicas that may fail one request until it is given up."""
    max_lost: int = 2
    """Replicas that may fail with a request before its first token: it may be the cause."""
    drain_timeout_s: float = 120.0
    """After so long, answers of a draining replica go on elsewhere, as far as they can."""
    hands_over: bool = True
    """True if prompts are computed on prefill replicas at all."""


class Settings(FlowConfig, frozen=True, kw_only=True):
    """The section, and numbers that are no options."""

    prefill_requests: int = 16
    """Prompts in flight at one replica."""
    max_pending_handoffs: int = 16
    """Requests being handed over to one decoder, until each has brought its first token."""
    resume_within_s: float = 60.0
    """An answer that has stopped is given up when no replica can go on with it for so long."""
    busy_pause_s: float = 1.0
    """Seconds for which a replica that has refused work is left alone."""
    retry_pause_s: float = 1.0
    """Seconds for which a replica that has failed is left alone before it is tried again."""
    answer_timeout_s: float = 1800.0
    """The option of [front]. After so long a draining replica gives up answers that cannot go on
    elsewhere."""
    stale_after_s: float = 10.0
    """Metrics older than that say nothing of the pool or the load."""


class OverloadConfig(Section, frozen=True, kw_only=True):
    """When requests are refused."""

    ttft_target_s: float = 5.0
    """From arrival to the first token, the prompt's own time aside; requests that would wait longer
    are refused at once."""
    max_queue: int = 2048


class PlannerConfig(Section, frozen=True, kw_only=True):
    """When roles change and replicas come and go."""

    mode: Mode = Mode.MANUAL
    min_prefill: int = 1
    min_decode: int = 1
    down_hold_s: float = 120.0
    """Too many replicas for so long, and one goes."""
    standby_ttl_s: float = 60.0
    live_takeover: bool = True
    """True if replicas that are loading are given requests already."""


class HealthConfig(Section, frozen=True, kw_only=True):
    """Settings of the replicas' monitor."""

    every_s: float = 1.0
    """Between two looks at a replica's metrics; its health is asked for at every second one."""
    timeout_s: float = 5.0
    failures: int = 3
    """Missed answers in a row until a replica counts as failed; a refused connection is one."""
    max_failures: int = 3
    """Failures within two minutes until a replica is quarantined."""
    quarantine_s: float = 30.0
    """At first; doubled each time."""
    load_timeout_s: float = 600.0
    """An engine that is started, woken or awaited has so long to serve."""
    command_timeout_s: float = 60.0
    """Replicas' `start` and `stop` commands have so long to end."""
