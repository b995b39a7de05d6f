"""The prompt that a command is given: token ids, or text that is turned into them.

An engine, or a model's files, turn the text into token ids.
"""

import functools
import inspect
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, TextIO

import click
import msgspec

from vllm_kvpool.cli.common.prompt import read_tokens
from vllm_kvpool.direct_http import open_directly, read_whole
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.parsing import UNREADABLE

ENGINE_TIMEOUT_S = 30.0

Prompt = str | list[dict[str, Any]]
"""Text as of `/v1/completions`, or messages as of `/v1/chat/completions`."""
NOTHING_ELSE: Mapping[str, Any] = {}


class TokenizerAway(ConfigError):
    """An engine that was to tokenize does not answer, or cannot now."""


class _Tokenized(msgspec.Struct):
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The prompt that a command is given, if any, and the salt of its request."""

    tokens_file: TextIO | None
    text_file: TextIO | None
    messages_file: TextIO | None
    tokenizer: str | None
    cache_salt: str

    @property
    def is_given(self) -> bool:
        """True if a file of tokens, text or messages was named."""
        return any((self.tokens_file, self.text_file, self.messages_file))

    def tokens(self) -> list[int] | None:
        """Return the token ids of the prompt, None without one.

        Raises ConfigError if it cannot be read.
        """
        files = (self.tokens_file, self.text_file, self.messages_file)
        if sum(each is not None for each in files) > 1:
            raise click.UsageError("give one of --tokens, --text and --messages")
        if self.tokenizer and not (self.text_file or self.messages_file):
            raise click.UsageError("--tokenizer is for --text and --messages")
        if self.tokens_file is not None:
            return read_tokens(_text_of(self.tokens_file))
        if not self.is_given:
            return None
        if not self.tokenizer:
            raise click.UsageError("--text and --messages need --tokenizer")
        if self.text_file is not None:
            return tokenize(_text_of(self.text_file), self.tokenizer)
        assert self.messages_file is not None
        return tokenize(read_messages(_text_of(self.messages_file)), self.tokenizer)


def _text_of(file: TextIO) -> str:
    try:
        return file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file.name} is no text in UTF-8: {error}") from None


def prompt_options(command: Any) -> Any:
    """Add the options that name a prompt to a command, which takes them as `given`."""

    @functools.wraps(command)
    def with_prompt(
        tokens: TextIO | None,
        text: TextIO | None,
        messages: TextIO | None,
        tokenizer: str | None,
        cache_salt: str,
        **others: Any,
    ) -> Any:
        given = PromptOptions(tokens, text, messages, tokenizer, cache_salt)
        return command(given=given, **others)

    for option in (
        click.option("--cache-salt", default="", help="The salt of that prompt's request."),
        click.option(
            "--tokenizer",
            help="For --text and --messages: URL of an engine or router, or a model's directory.",
        ),
        click.option("--messages", type=click.File(), help="A file with a chat's JSON messages."),
        click.option("--text", type=click.File(), help="A file with a prompt's text."),
        click.option("--tokens", type=click.File(), help="A file with a prompt's token ids, JSON."),
    ):
        with_prompt = option(with_prompt)
    return with_prompt


def tokenize(prompt: Prompt, tokenizer: str, beside: Mapping[str, Any] = NOTHING_ELSE) -> list[int]:
    """Return the token ids that an engine makes of a prompt. Blocks.

    `tokenizer` is the URL of an engine or router, whose `/tokenize` is asked, or the directory or
    name of a model, which needs transformers. `beside` are other fields of the request: `model`,
    and of a chat `tools` and `chat_template_kwargs`. ConfigError if it cannot be used or refuses
    the prompt, TokenizerAway if the engine does not answer.
    """
    if is_engine(tokenizer):
        return _by_engine(prompt, tokenizer.rstrip("/"), beside)
    return _by_files(prompt, tokenizer, beside)


def is_engine(tokenizer: str) -> bool:
    """Return True if an engine or a router makes the tokens, not a model's files."""
    return tokenizer.startswith(("http://", "https://"))


def read_messages(text: str) -> list[dict[str, Any]]:
    """Return the messages from JSON, a list of them or an object with `messages`; ConfigError."""
    try:
        given = json.loads(text)
        messages = given["messages"] if isinstance(given, dict) else given
        return msgspec.convert(messages, list[dict[str, Any]])
    except (*UNREADABLE, KeyError) as error:
        raise ConfigError(f"--messages: expected a JSON list of messages: {error}") from None


def _by_engine(prompt: Prompt, url: str, beside: Mapping[str, Any]) -> list[int]:
    given = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
    body = json.dumps({**beside, **given}).encode()
    headers = {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(f"{url}/tokenize", body, headers)
        with open_directly(request, ENGINE_TIMEOUT_S) as answer:
            body = read_whole(answer, ENGINE_TIMEOUT_S)
            return msgspec.json.decode(body, type=_Tokenized).tokens
    except urllib.error.HTTPError as error:
        with error:
            detail = error.read(500).decode(errors="replace")
        kind = ConfigError if error.code < 500 else TokenizerAway
        raise kind(f"--tokenizer: {url}/tokenize: {error} {detail}".rstrip()) from None
    except (OSError, HTTPException, *UNREADABLE) as error:
        why = getattr(error, "reason", error)  # of urllib
        raise TokenizerAway(f"--tokenizer: {url}/tokenize: {why}") from None


_one_at_a_time = threading.Lock()  # tokenizers of transformers must not be shared by threads


@functools.cache
def _loaded(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def _by_files(prompt: Prompt, model: str, beside: Mapping[str, Any]) -> list[int]:
    if model.startswith((".", "/", "~")) and not os.path.isdir(model):
        raise ConfigError(
            f"--tokenizer: there is no directory {model}; name a model's, or the URL of an engine"
        )
    try:
        from jinja2 import TemplateError

        with _one_at_a_time:
            loaded = _loaded(model)
            tokens = (
                loaded.encode(prompt)
                if isinstance(prompt, str)
                else _rendered(loaded.apply_chat_template, prompt, beside)
            )
    except ImportError:
        raise ConfigError(
            "--tokenizer: a model's files need transformers, which comes with vLLM; or name the "
            "URL of an engine"
        ) from None
    except (OSError, ValueError, TypeError, TemplateError) as error:
        raise ConfigError(f"--tokenizer: {model}: {error}") from None
    return list(map(int, tokens))


def _rendered(
    apply: Callable[..., list[int]], messages: list[dict[str, Any]], beside: Mapping[str, Any]
) -> list[int]:
    given = beside.get("chat_template_kwargs") or {}
    own = inspect.signature(apply).parameters  # of the call, such as another template
    of_template = {name: value for name, value in given.items() if name not in own}
    return apply(
        messages,
        tools=beside.get("tools"),
        add_generation_prompt=True,
        return_dict=False,
        **of_template,
    )
