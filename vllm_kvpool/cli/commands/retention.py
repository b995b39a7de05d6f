"""`kvpool purge` and `kvpool pin`."""

import sys

import click

from vllm_kvpool.cli import retention
from vllm_kvpool.cli.common import prompt
from vllm_kvpool.cli.common.command import Command
from vllm_kvpool.cli.common.stores import StoreOptions, manifest_named, opened, store_options
from vllm_kvpool.cli.common.tokenizer import PromptOptions, prompt_options
from vllm_kvpool.identity.chunk_hash import tenant_of
from vllm_kvpool.identity.keys import is_namespace


@click.command("purge", cls=Command)
@click.argument("namespaces", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@prompt_options
@click.option("--older-than", "age", help="Only cells written longer ago: 90s, 30m, 12h, 7d, 2w.")
@click.option(
    "--tenant", default="", help="Only cells of this tenant, as `kvpool inspect` shows it."
)
@store_options
def purge_command(
    namespaces: tuple[str, ...],
    yes: bool,
    given: PromptOptions,
    age: str | None,
    tenant: str,
    stores: StoreOptions,
) -> None:
    """Remove the cells of NAMESPACES from stores.

    NAMESPACES are whole names. Without other options all of their cells are removed. A prompt
    names its own cells, its end and its aliases. In directories it also names its cells of drafters
    and of engines with another layer_span; other stores keep these. --cache-salt or --tenant alone
    names the cells of its requests, --older-than those written longer ago. Engines that run may
    save new ones; what they have in host memory stays. Exits with 1 if a store keeps named cells.
    """
    for name in namespaces:
        if not is_namespace(name):
            raise click.UsageError(f"{name!r} is no namespace; `kvpool inspect` shows their names")
    tokens, salt = given.tokens(), given.cache_salt
    if tokens is not None and (age is not None or len(namespaces) != 1):
        raise click.UsageError("a prompt needs one namespace, and no --older-than")
    if [bool(salt and tokens is None), bool(tenant), age is not None].count(True) > 1:
        raise click.UsageError("give one of --cache-salt, --tenant and --older-than")
    if tenant and tokens is not None:
        raise click.UsageError("give a prompt or --tenant")
    age_s = None if age is None else retention.parse_duration_s(age)
    specs = stores.stores()
    if not yes and sys.stdin is None:
        raise click.UsageError("there is no stdin to ask; give --yes")
    if not yes:
        what = ", ".join(namespaces)
        what = what if tokens is None else f"a prompt of {what}"
        what = f"what has the given salt of {what}" if salt else what
        what = f"what is {tenant}'s of {what}" if tenant else what
        what = what if age is None else f"what is older than {age} of {what}"
        where = ", ".join(spec.url for spec in specs)
        click.confirm(f"remove {what} from {where}?", abort=True, err=True)
    with opened(specs, writable=True) as each:
        if tokens is not None:
            names = prompt.names_of(manifest_named(each, namespaces[0]), tokens, salt)
            keys = [*names.keys(), *names.end_keys(), *names.alias_keys()]
            answers = retention.remove_prompt(each, namespaces[0], keys)
        elif salt or tenant:
            answers = retention.remove_tenant(each, namespaces, tenant or tenant_of(salt))
        elif age_s is not None:
            answers = retention.remove_older(each, namespaces, age_s)
        else:
            answers = retention.remove_namespaces(each, namespaces)
    stores.print(answers, retention.as_text(answers))
    if any(answer.num is None for answer in answers):
        raise SystemExit(1)  # a part was not removed


@click.command("pin", cls=Command)
@click.argument("namespace")
@prompt_options
@click.option("--for", "duration", help="How long: 90s, 30m, 12h, 7d, 2w.")
@click.option("--end", is_flag=True, help="End the prompt's pins.")
@store_options
def pin_command(
    namespace: str,
    given: PromptOptions,
    duration: str | None,
    end: bool,
    stores: StoreOptions,
) -> None:
    """Protect a stored prompt from eviction for a time.

    The beginning of NAMESPACE or of its digest is enough. Chunks that are not stored yet are not
    pinned. Exits with 1 if no chunk is stored.
    """
    if (duration is None) != end:
        raise click.UsageError("give --for or --end")
    tokens = given.tokens()
    if tokens is None:
        raise click.UsageError("give a prompt: --tokens, --text or --messages")
    seconds = 0.0 if duration is None else retention.parse_duration_s(duration)
    with opened(stores.stores(), writable=True) as each:
        names = prompt.names_of(manifest_named(each, namespace), tokens, given.cache_salt)
        answers = retention.pin(each, names.keys(), seconds)
    stores.print(answers, retention.as_text(answers))
    if all(answer.num is None for answer in answers):
        raise SystemExit(1)
    if not (end or any(each.num for each in answers)):
        raise click.ClickException(
            f"nothing was pinned of these {len(tokens)} tokens in {namespace}; `kvpool explain "
            f"{namespace}` with the same prompt shows what is stored"
        )
