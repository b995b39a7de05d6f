"""What the router's parts are told, out of the configuration (values)."""

import logging
from collections.abc import Mapping

from vllm_kvpool.config import environment, read_config
from vllm_kvpool.prefetch.route import pool_options, route_of, scheme_of
from vllm_kvpool.router.config import LOCK_HYSTERESIS, MAX_REPLICAS, RouterConfig
from vllm_kvpool.router.control.breaker import BreakerLimits
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.control.desk import Settings
from vllm_kvpool.router.control.events import Mode
from vllm_kvpool.router.control.overload import OverloadLimits
from vllm_kvpool.router.control.placement import Budgets
from vllm_kvpool.router.control.planner import PlanLimits
from vllm_kvpool.router.control.scaling import HostSpec, ScalingSettings
from vllm_kvpool.router.control.shedding import ShedLimits
from vllm_kvpool.router.control.standings import WeightSource as Source
from vllm_kvpool.router.ops.commands import (
    PREFETCH_PLACEHOLDERS,
    LaunchHost,
    WeightSource,
    in_environment,
    read_template,
)

log = logging.getLogger(__name__)

FAILURE_WINDOW_S, MAX_QUARANTINE_S = 120.0, 600.0
FLIP_COOLDOWN_S = 20.0
_SOURCES = {
    WeightSource.DISK: Source.DISK,
    WeightSource.HOST_MEMORY: Source.MEMORY,
    WeightSource.PRELOAD: Source.MEMORY,
}


def controller_of(config: RouterConfig) -> Controller:
    """A controller that does as the configuration says; ConfigError where it cannot."""
    flow, overload, health = config.flow, config.overload, config.health
    if overload.lock_at <= flow.headroom:
        log.warning(
            "[overload] lock_at %s is not above [flow] headroom %s: decoders that the router has "
            "filled are locked, and their batches run half empty; raise the one or lower the other",
            *(overload.lock_at, flow.headroom),
        )
    return Controller(
        Settings(
            budgets=Budgets(
                prefill_tokens=flow.prefill_tokens,
                prefill_requests=flow.prefill_requests,
                decode_requests=flow.decode_requests,
                headroom=flow.headroom,
            ),
            max_attempts=flow.max_attempts,
            max_lost=flow.max_lost,
            resume_within_s=flow.resume_within_s,
            busy_pause_s=flow.busy_pause_s,
            drain_timeout_s=flow.drain_timeout_s,
            retry_pause_s=health.retry_pause_s,
            spills=flow.spills,
            hands_over=flow.hands_over,
            takes_over=config.planner.live_takeover,
        ),
        scaling=_scaling(config),
        overload=OverloadLimits(
            lock_watermark=overload.lock_at,
            release_watermark=overload.lock_at - LOCK_HYSTERESIS,
        ),
        shed=ShedLimits(
            ttft_target_s=overload.ttft_target_s, max_queued_requests=overload.max_queue
        ),
        breaker=BreakerLimits(
            failures=health.max_failures,
            window_s=FAILURE_WINDOW_S,
            first_quarantine_s=health.quarantine_s,
            longest_quarantine_s=max(MAX_QUARANTINE_S, health.quarantine_s),
        ),
    )


def _scaling(config: RouterConfig) -> ScalingSettings:
    planner = config.planner
    return ScalingSettings(
        mode=Mode(planner.mode),
        standby_ttl_s=planner.standby_ttl_s,
        hosts=tuple(
            HostSpec(
                name=host.name,
                address=host.address,
                first_port=host.first_port,
                slots=host.max_replicas,
                source=_SOURCES[host.weight_source],
            )
            for host in config.hosts
        ),
        limits=PlanLimits(
            min_prefill=planner.min_prefill,
            # Engines are started on hosts only, so those bound them.
            max_prefill=MAX_REPLICAS,
            min_decode=planner.min_decode,
            max_decode=MAX_REPLICAS,
            max_total=MAX_REPLICAS,
            queue_target_s=planner.queue_target_s,
            down_hold_s=planner.down_hold_s,
            flip_cooldown_s=FLIP_COOLDOWN_S,
        ),
    )


def prefetch_commands(
    config: RouterConfig, hosts: Mapping[str, LaunchHost]
) -> dict[str, tuple[str, ...]]:
    """What is run to bring cells near, by host; none where nothing can be brought.

    ConfigError where the command cannot work.
    """
    launch = config.launch
    template = read_template(
        "[launch] prefetch_command", launch.prefetch_command, PREFETCH_PLACEHOLDERS
    )
    if not launch.prefetch_bytes or not config.planner.live_takeover:
        return {}
    values = {
        "kv_transfer_config": launch.kv_transfer_config,
        "max_bytes": str(launch.prefetch_bytes),
        "max_seconds": f"{launch.load_timeout_s:g}",
    }
    commands = {}
    for given in config.hosts:
        host = hosts[given.name]
        # What a process inherits on another host is not known here.
        inherited = environment() if host.prefix is None else {}
        if _can_bring(launch.kv_transfer_config, {**inherited, **given.env}):
            command = in_environment(given.env, template.render(values, {}))
            commands[given.name] = host.command(command)
    return commands


def _can_bring(kv_transfer_config: str, env: Mapping[str, str]) -> bool:
    """Whether engines' cells may lie in a far tier, and be brought into a near one."""
    try:
        options = pool_options(kv_transfer_config)
        urls = () if options is None else read_config(options, env).store_urls
    except ValueError as error:  # a ConfigError, too: engines will say so
        log.warning("nothing is prefetched: kv_transfer_config: %s", error)
        return False
    return route_of([scheme_of(url) for url in urls]) is not None
