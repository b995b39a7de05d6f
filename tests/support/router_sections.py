"""The sections of the router's file, by name."""

from typing import get_type_hints

from vllm_kvpool.router.config import RouterConfig, _section_in

SECTIONS = {
    name: kind
    for name, hint in get_type_hints(RouterConfig).items()
    if (kind := _section_in(hint)) is not None
}
