"""What the controller is told of the end of a call (pure)."""

from vllm_kvpool.router.control.events import Decode, DecodeEnded, Outcome, Prefill, PrefillEnded
from vllm_kvpool.router.dataplane.replies import Said
from vllm_kvpool.router.dataplane.upstream import EngineBroke, EngineUnreached


def ended(
    call: Prefill | Decode, outcome: Outcome, said: Said, seconds: float
) -> PrefillEnded | DecodeEnded:
    """Its event; a prefill took so many `seconds`."""
    if isinstance(call, Decode):
        return DecodeEnded(
            request_id=call.request_id,
            replica=call.replica,
            outcome=outcome,
            prompt_tokens=said.prompt_tokens,
            output_tokens=said.output_tokens,
        )
    return PrefillEnded(
        request_id=call.request_id,
        replica=call.replica,
        outcome=outcome,
        prompt_tokens=said.prompt_tokens,
        saved_tokens=said.saved_tokens,
        cached_tokens=said.cached_tokens,
        seconds=seconds,
    )


def outcome_of_error(error: Exception) -> Outcome:
    """What it means to the request that an engine has not answered as one."""
    match error:
        case EngineUnreached():
            return Outcome.UNREACHED
        case EngineBroke():
            return Outcome.LOST
    return Outcome.FAILED
