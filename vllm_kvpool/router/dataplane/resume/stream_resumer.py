"""A client's stream, joined from the streams of one engine after another (pure).

A chunk with tokens and no text is held back until text comes: after a failure its tokens are
generated again. Nothing else waits. The client gets each token exactly once. Tokens that an engine
generates again are compared with the client's, then dropped.
"""

from array import array
from dataclasses import dataclass, field

from vllm_kvpool.router.dataplane.request_body import (
    ApiPath,
    ClientRequest,
    count_ids,
    error_body,
    value_of,
)
from vllm_kvpool.router.dataplane.responses import (
    BAD_REQUEST,
    SERVER_ERROR,
    UNKNOWN,
    EngineLost,
    PromptDetails,
    PromptUsage,
    Usage,
    check_end,
)
from vllm_kvpool.router.dataplane.resume.answer import BEGINNING, Answer, Overlap, ResumePoint
from vllm_kvpool.router.dataplane.resume.chunks import (
    DONE,
    IDS,
    PROMPT_IDS,
    Choice,
    Chunk,
    Failure,
    Patch,
    Piece,
    end_chunk,
    has_other_details,
    head_of,
    is_only_for_ids,
    is_something,
    nulled,
    num_logprobs,
    patched,
    pieces_of,
    prompt_ids_of,
    read,
    text_ends,
    usage_chunk,
    with_details,
    with_head,
)
from vllm_kvpool.router.dataplane.resume.policy import (
    Detokenize,
    NotResumable,
    ResumeDecision,
    ResumeMode,
    ResumePlan,
    ResumePolicy,
    is_greedy,
    joined_ids,
    resume_body,
    same_ids,
    stop_strings,
)


@dataclass(frozen=True, slots=True)
class Resume:
    """POST `body` to the request's path of any engine, and feed what it streams.

    It may be sent to one engine after another until one streams. `num_tokens` of the answer go with
    the prompt; so many less are left to generate.
    """

    mode: ResumeMode
    body: bytes
    num_tokens: int = 0
    is_draw_repeated: bool = False
    """True if the engine must sample known text again. It rarely samples the same text."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer is complete; only its end was lost. The client is sent the rest of it."""

    payloads: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer cannot go on.

    The client is sent `payloads`; the first alone, as a body, if it has no status yet.
    """

    why: str
    payloads: tuple[bytes, ...]


Step = Resume | Detokenize | Finish | Refusal


NO_OVERLAP = Overlap(())


@dataclass(slots=True)
class Stream:
    """The present engine's stream, while it is read."""

    mode: ResumeMode = ResumeMode.REPEAT
    goes_on: bool = False
    """True if the client has something already; else it is as the first."""
    start: ResumePoint = BEGINNING
    """The point of the answer at which the stream begins."""
    sent_ids: bytes = b""
    """Prompt ids that its engine is to take; empty once it has said that it has."""
    overlap: Overlap = NO_OVERLAP
    kind: str | None = None
    """Field that its first text must have, if no text is compared; None: any."""
    pending_text: str = ""
    """Text that comes before its first."""
    ids: "array[int]" = field(default_factory=lambda: array("i"))
    """Its tokens, as long as it is behind what the client has."""
    ends: "array[int]" = field(default_factory=lambda: array("q"))
    is_behind: bool = False
    num_tokens: int = 0
    """Tokens of the answer up to the end of the last chunk."""
    num_payloads: int = 0
    earlier_chars: int = 0
    earlier_reasoning_tokens: int = 0
    head: bytes = b""


MAX_RESUMES = 8
MAX_HELD_CHUNKS = 1024
MORE_PAYLOADS = 64
"""Payloads of a sequence beside one for each token: its role, its end, what a parser held back."""


class StreamResumer:
    """The stream of one client, which goes on with another engine where one fails.

    `feed` takes the payloads of the present engine's stream and gives those for the client: byte
    for byte as vLLM would have sent them, less what only the router has asked for. It raises
    `EngineLost` when the stream cannot go on. The owner then calls `lost`, as it does when the
    connection breaks or ends before `[DONE]`, and performs the step that `lost` returns. `Resume`:
    ask another engine and feed its stream. `Detokenize`: ask an engine for the text of tokens, and
    call `detokenized`. `Finish`, `Refusal`: send the client the last payloads.

    Token ids are asked for besides (`track`) where the request is `trackable`. Owned by one task;
    it neither waits nor knows the time.
    """

    def __init__(self, request: ClientRequest, prompt: PromptUsage | None = None) -> None:
        withholds = not request.value("include_stop_str_in_output")
        self._stops = stop_strings(request)
        self.answer = Answer(self._stops, withholds)
        self.answer.has_ids = request.trackable
        self.num_resumes = 0
        self.ended = False
        """True once the client has been given all of the answer, `[DONE]` included."""
        self.prompt = prompt or PromptUsage()
        """While the prompt is computed, a usage with details is held back for `held_usage`."""
        self._late_usage: tuple[bytes, Chunk] | None = None
        self._request = request
        self._is_chat = request.api_path is ApiPath.CHAT
        asks_ids, logprobs = request.asks_token_ids, request.value("logprobs")
        # `logprobs: 0` of a completion asks for those of the chosen tokens, without alternatives.
        has_logprobs = bool(logprobs) if self._is_chat else logprobs is not None
        self._hides_ids = request.trackable and not asks_ids
        """Only the router has asked for token ids."""
        self._tells_tokens = asks_ids or has_logprobs
        """The client sees which tokens there are."""
        self._counts_chars = has_logprobs and not self._is_chat
        """Its chunks have a `text_offset`."""
        self._num_choices = request.n * max(1, request.num_prompts)
        self._most_tokens = request.most_tokens
        self._most_payloads = self._num_choices * (self._most_tokens + MORE_PAYLOADS)
        self._text_kind = "content" if self._is_chat else "text"
        """The field that holds plain text."""
        self._restart = ResumePolicy(request, self.answer)
        self._stream = Stream()
        self._head = b""
        self._held: list[bytes] = []
        self._usage: Usage | None = None
        self.has_begun = False
        """True if the client has been sent anything."""
        self._has_role = self._has_error = self._has_usage = False
        """True if the client has been sent a role, an error, a usage."""
        self._num_finished = 0
        """Choices whose end the client has been sent."""

    @property
    def prompt_tokens(self) -> int | None:
        """Known from the first chunk on, where token ids are; else from the stream's usage."""
        ids = self.answer.prompt_ids
        if ids:
            return count_ids(ids)
        return self._usage.prompt_tokens if self._usage is not None else None

    @property
    def output_tokens(self) -> int | None:
        """Tokens of all choices by the stream's usage; None before the usage has come."""
        return self._usage.completion_tokens if self._usage is not None else None

    @property
    def engine_details(self) -> PromptDetails:
        """Details of the prompt as the present engine's usage says."""
        details = self._usage.prompt_tokens_details if self._usage is not None else None
        return details or UNKNOWN

    @property
    def holds_usage(self) -> bool:
        """True if the stream's usage is held back."""
        return self._late_usage is not None

    def held_usage(self) -> list[bytes]:
        """Return the usage that was held back, with the details as they are known now."""
        return [] if self._late_usage is None else [self._outgoing(*self._late_usage)]

    def feed(self, payload: bytes) -> list[bytes]:
        """Return the client's payloads for one payload of the engine. Raises EngineLost."""
        assert not self.ended
        if payload == DONE:
            return self._done()
        chunk = read(payload)
        self._stream.num_payloads += 1
        if self._stream.num_payloads > self._most_payloads:
            raise EngineLost(f"the engine says more than the {self._most_tokens} tokens asked for")
        if chunk.error is not None:
            return self._error(payload, chunk.error)
        if not self._stream.head:
            self._stream.head = head_of(payload)
            if not self.has_begun:
                self._head = self._stream.head
        self._usage = chunk.usage if chunk.usage and not chunk.choices else self._usage
        for choice in chunk.choices:
            if choice.index >= self._num_choices:
                raise EngineLost(f"the engine says choice {choice.index} of {self._num_choices}")
            check_end(choice, self._stops)
        if self.prompt.is_computing and not chunk.choices and self.engine_details != UNKNOWN:
            self._late_usage = payload, chunk
            return []
        if self._num_choices > 1:
            self._num_finished += sum(bool(each.finish_reason) for each in chunk.choices)
            if self.prompt.details is not None and self._tells_other_details(chunk):
                payload = with_details(payload, self.prompt.details)
            self._has_usage |= not chunk.choices
            return self._tell(payload)
        if not self.answer.prompt_ids or self._stream.sent_ids:
            self._see_prompt(chunk)
        if chunk.choices:
            return self._choice(payload, chunk, chunk.choices[0])
        self._has_usage = True
        return self._tell(self._outgoing(payload, chunk))

    def lost(self, *, rejected: bool = False) -> Step:
        """Return what to do after the present engine's stream has ended, broken, or failed `feed`.

        `rejected`: the engine has refused what `Resume` says (a 4xx but 429), so others will too.
        """
        assert not self.ended
        if rejected and self._stream.mode is ResumeMode.RESUME:
            self._restart.unable()
        self._held.clear()
        if self._has_error or self._num_finished == self._num_choices:
            return self._finish()
        if self._has_all_tokens():
            return self._finish("")
        self.num_resumes += 1
        if self.num_resumes > MAX_RESUMES:
            return self._refuse(f"it has lost its engine {self.num_resumes} times")
        if self._num_choices > 1 and self.has_begun:
            return self._refuse("several choices or prompts at once cannot be continued")
        return self._go(self._restart.begin())

    def detokenized(self, text: str | None) -> Step:
        """Take the answer to `Detokenize`; None if no engine gives one."""
        return self._go(self._restart.detokenized(text))

    def _has_all_tokens(self) -> bool:
        """Return True if the client has all tokens that it may get, and all text of them."""
        is_known = self._request.trackable and not self.answer.withheld_chars
        return is_known and self.answer.num_delivered >= self._most_tokens

    def _done(self) -> list[bytes]:
        if not self._has_error and self._num_finished < self._num_choices:
            raise EngineLost("the engine has ended its stream before the answer has ended")
        self.ended = True
        return [DONE]

    def _error(self, payload: bytes, failure: Failure) -> list[bytes]:
        if not BAD_REQUEST <= (failure.code or SERVER_ERROR) < SERVER_ERROR:
            raise EngineLost(f"the engine has failed: {failure.message}")
        if self._stream.mode is ResumeMode.RESUME:
            # The request was good enough for the first engine.
            self._restart.unable()
            raise EngineLost(f"the engine does not go on: {failure.message}")
        self._has_error = True
        return self._tell(payload)

    def _see_prompt(self, chunk: Chunk) -> None:
        raw = prompt_ids_of(chunk)
        if raw is None:
            return
        if not self.answer.prompt_ids:
            self.answer.prompt_ids = bytes(raw)
        sent, self._stream.sent_ids = self._stream.sent_ids, b""
        if sent and not same_ids(bytes(raw), sent):
            self._restart.unable()
            raise EngineLost("the engine has not taken the tokens that it was to go on from")

    def _choice(self, payload: bytes, chunk: Chunk, choice: Choice) -> list[bytes]:
        stream, delta = self._stream, choice.delta
        is_end = choice.finish_reason is not None
        pieces = pieces_of(choice)
        if delta is not None and delta.role and not pieces and not is_end:
            if self._has_role:
                return []
            self._has_role = True
            return self._tell(self._outgoing(payload, chunk))
        self._has_role |= delta is not None and bool(delta.role)
        if stream.sent_ids:
            self._restart.unable()
            raise EngineLost("the engine does not say which tokens it goes on from")
        new = self._new_text(pieces, is_end)
        skipped = self._take_ids(choice, pieces)
        self._catch_up()
        if is_end and stream.is_behind:
            raise self._diverged("ends before what the client has")
        has_calls = delta is not None and is_something(delta.tool_calls)
        self.answer.has_tool_calls |= has_calls
        says = bool(new) or is_end or has_calls
        if not says and self._is_nothing(payload, choice, pieces):
            return []
        out = self._outgoing(payload, chunk, None if new == pieces else new, skipped)
        if not says and isinstance(choice.token_ids, list):
            self._held.append(out)
            return self._tell() if len(self._held) > MAX_HELD_CHUNKS else []
        self.answer.add_text(new, len(choice.token_ids or ()), stream.num_tokens)
        self._num_finished += is_end
        return self._tell(out)

    def _new_text(self, pieces: list[Piece], is_end: bool) -> list[Piece]:
        """Return the pieces that the client does not have, the pending text before them."""
        stream = self._stream
        if not pieces and not (is_end and stream.pending_text):
            return []
        kind, text = pieces[0] if pieces else (stream.kind or self._text_kind, "")
        if stream.kind not in (None, kind):
            # It does not see where in the answer it is; another would not either.
            self._restart.unable()
            raise EngineLost(f"the engine says as {kind} what was {stream.kind}")
        new = stream.overlap.cut([(kind, stream.pending_text + text), *pieces[1:]])
        if new is None:
            raise self._diverged("says something else than the client has")
        stream.pending_text, stream.kind = "", None
        return new

    def _take_ids(self, choice: Choice, pieces: list[Piece]) -> int:
        """Note the tokens; returns how many of them the client has been told already."""
        answer, stream, ids = self.answer, self._stream, choice.token_ids
        if not isinstance(ids, list):
            # What a chat echoes has none at all; what is generated has, or they are not known.
            answer.has_ids &= ids is not None
            # In a stream that has ids elsewhere, they alone count.
            return 0 if self._request.trackable else self._take_logprobs(choice)
        begin, skipped = stream.num_tokens, 0
        if self._tells_tokens and begin < answer.num_delivered:
            skipped = min(len(ids), answer.num_delivered - begin)
            if answer.ids[begin : begin + skipped].tolist() != ids[:skipped]:
                raise self._diverged("generates other tokens than the client has")
        stream.num_tokens += len(ids)
        if self._request.trackable and stream.num_tokens > self._most_tokens:
            stream.num_tokens -= len(ids)
            raise EngineLost(f"the engine says more than the {self._most_tokens} tokens asked for")
        (stream.ids if stream.is_behind else answer.ids).extend(ids)
        if self._counts_chars:
            ends = [stream.earlier_chars + each for each in text_ends(choice)]
            (stream.ends if stream.is_behind else answer.ends).extend(ends)
            answer.has_ids &= len(ends) == len(ids)
        if pieces and pieces[0][0] != self._text_kind:
            answer.is_parsed = True
            answer.num_reasoning_tokens += len(ids)
        return skipped

    def _take_logprobs(self, choice: Choice) -> int:
        """Count tokens without ids by their log-probabilities; returns as `_take_ids` does."""
        num_told = max(0, self.answer.num_delivered - self._stream.num_tokens)
        num_new = num_logprobs(choice)
        self._stream.num_tokens += num_new
        return min(num_told, num_new)

    def _catch_up(self) -> None:
        """Take the engine's tokens as the answer's, once it has said all that the client has."""
        stream, answer = self._stream, self.answer
        if not stream.is_behind or stream.overlap:
            return
        if self._tells_tokens and stream.num_tokens < answer.num_delivered:
            return
        answer.replace_after(stream.start.num_tokens, stream.ids, stream.ends)
        stream.is_behind = False

    def _is_nothing(self, payload: bytes, choice: Choice, pieces: list[Piece]) -> bool:
        """Return True if a chunk without new text has nothing for the client."""
        stream = self._stream
        if self._hides_ids and is_only_for_ids(choice, payload):
            self.answer.is_parsed = True
            return True
        if stream.num_tokens > self.answer.num_delivered:
            return False
        return stream.goes_on and (bool(pieces) or stream.is_behind or stream.num_tokens > 0)

    def _tell(self, *payloads: bytes) -> list[bytes]:
        told = [*self._held, *payloads]
        self._held.clear()
        self.has_begun = True
        self.answer.num_delivered = max(self.answer.num_delivered, self._stream.num_tokens)
        return told

    def _outgoing(
        self,
        payload: bytes,
        chunk: Chunk,
        pieces: list[Piece] | None = None,
        skipped: int = 0,
    ) -> bytes:
        """Return a chunk as the first engine would have sent it.

        `pieces`: all text that is left of it.
        """
        stream = self._stream
        num_earlier = stream.start.num_tokens
        counts_on = bool(num_earlier) and (chunk.usage is not None or self._counts_chars)
        counts_on |= self._tells_other_details(chunk)
        if pieces is not None or skipped or counts_on:
            patch = Patch(
                head=self._head,
                pieces=pieces,
                skipped_tokens=skipped,
                earlier_tokens=num_earlier,
                earlier_reasoning_tokens=stream.earlier_reasoning_tokens,
                earlier_chars=stream.earlier_chars,
                prompt_tokens=self.prompt_tokens or 0,
                details=self.prompt.details,
            )
            payload = patched(payload, patch)
        elif stream.head != self._head:
            payload = with_head(payload, stream.head, self._head)
        if self._hides_ids:
            payload = nulled(payload, IDS)
        if self._hides_ids or stream.goes_on:
            payload = nulled(payload, PROMPT_IDS)
        return payload

    def _tells_other_details(self, chunk: Chunk) -> bool:
        if chunk.usage is None or self.prompt.details is None:
            return False
        return has_other_details(chunk.usage.prompt_tokens_details, self.prompt.details)

    def _diverged(self, how: str) -> EngineLost:
        self._restart.failed(self._stream.mode)
        return EngineLost(f"the engine {how}")

    def _go(self, decision: ResumeDecision) -> Step:
        match decision:
            case Detokenize():
                return decision
            case NotResumable(why=why):
                return self._refuse(why)
            case ResumePlan():
                return self._resume(decision)

    def _resume(self, point: ResumePlan) -> Step:
        answer, request = self.answer, self._request
        num_tokens, num_chars = point.resume_point
        overlap = Overlap(answer.text_after(num_chars))
        resumes = point.mode is ResumeMode.RESUME
        self._stream = Stream(
            mode=point.mode,
            goes_on=self.has_begun,
            start=point.resume_point,
            overlap=overlap,
            kind=answer.kind if resumes and not overlap else None,
            pending_text=point.pending_text,
            is_behind=True,
            num_tokens=num_tokens,
            earlier_chars=answer.ends[num_tokens - 1] if resumes and self._counts_chars else 0,
            earlier_reasoning_tokens=answer.num_reasoning_tokens if resumes else 0,
        )
        if not resumes:
            answer.num_reasoning_tokens = 0
            body = request.whole_body(track=request.trackable)
            return Resume(point.mode, body)
        most = request.max_output_tokens
        if most is not None and num_tokens >= most:
            return self._finish(point.pending_text)
        ids = self._stream.sent_ids = joined_ids(self.answer.prompt_ids, answer.ids[:num_tokens])
        body = resume_body(request, ids, num_tokens, self.num_resumes, most)
        return Resume(point.mode, body, num_tokens, bool(overlap) and not is_greedy(request))

    def _finish(self, pending_text: str | None = None) -> Finish | Refusal:
        """End the stream without an engine; `pending_text`: its last text, if it had no end.

        Refuse where the client is owed a usage that only the engine knew.
        """
        request, answer = self._request, self.answer
        payloads: list[bytes] = []
        if pending_text is not None:
            ids: list[int] | None = [] if request.asks_token_ids else None
            payloads.append(end_chunk(self._head, self._is_chat, pending_text, ids))
        payloads += self.held_usage()
        options = request.members("stream_options")
        asks_usage = bool(value_of(options, "include_usage"))
        has_usage = self._has_usage or self.holds_usage or self._has_error or not asks_usage
        if not has_usage:
            if not answer.has_ids or (prompt_tokens := self.prompt_tokens) is None:
                return self._refuse("the usage of its answer is not known")
            details = self.prompt.details or UNKNOWN
            chunk = usage_chunk(self._head, prompt_tokens, self._stream.num_tokens, details)
            payloads.append(chunk)
        self.ended = True
        return Finish((*payloads, DONE))

    def _refuse(self, why: str) -> Refusal:
        self.ended = True
        message = f"The engine that answered has failed, and no other can go on: {why}."
        body = error_body(SERVER_ERROR, message, self._request.api_path.value)
        return Refusal(why, (body, DONE))
