"""The process that holds a vLLM engine; `engine.py` starts it and describes the protocol.

Reads `[op, argument]` lines from standard input and writes `[outcome, value]` lines to the file
descriptor given as first argument. Standard output stays free for what vLLM prints. The end of
standard input is the order to stop, so a parent that was killed leaves no engine behind.
"""

import json
import os
import sys
import traceback
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

TRANSFER_PARAMS = ("kv_transfer_params", "ec_transfer_params")
SQUARE_PIXELS = 14


class Child:
    """Answers the calls of `Engine`; `llm` is None until `start`."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.skips_teardown = False
        self.ops: dict[str, Callable[[Any], Any]] = {
            "start": self.start,
            "release": lambda _: self.release(),
            "generate": self.generate,
            "reset_prefix_cache": lambda _: self.llm.reset_prefix_cache(),
            "reset_encoder_cache": lambda _: self.llm.llm_engine.reset_encoder_cache(),
            "watch_encoder": lambda raises: self.watch_encoder(raises),
            "images_encoded": lambda _: self.unnoticed(_images_encoded),
            "watch_drafts": lambda loaded: self.unnoticed(_watch_drafts, loaded),
            "draft_probabilities": lambda _: self.unnoticed(_draft_probabilities),
            "reset_pool": lambda _: self.llm.reset_prefix_cache(reset_connector=True),
            "metrics": lambda _: self.metrics(),
            "by_label": lambda asked: self.by_label(*asked),
            "rpc": lambda call: self.rpc(*call),
            "set_weights": lambda change: SET_WEIGHTS[change[0]](self.llm, change[1]),
            "sleep": lambda level: self.llm.sleep(level),
            "wake_up": lambda tags: self.llm.wake_up(tags),
            "skip_teardown": lambda _: self.skip_teardown(),
        }

    def start(self, arguments: dict[str, Any]) -> None:
        self.llm = engine_class()(**arguments)

    def release(self) -> str:
        import vllm

        return str(vllm.__version__)

    def generate(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        loras = [_lora(prompt["lora"]) for prompt in prompts]
        outputs = self.llm.generate(
            [_engine_prompt(prompt) for prompt in prompts],
            [_sampling(prompt) for prompt in prompts],
            use_tqdm=False,
            lora_request=loras if any(loras) else None,
        )
        return [_answer(output) for output in outputs]

    def metrics(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                totals[metric.name] = totals.get(metric.name, 0.0) + metric.value
        return totals

    def by_label(self, name: str, label: str) -> dict[str, float]:
        totals: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if metric.name == name:
                key = metric.labels[label]
                totals[key] = totals.get(key, 0.0) + metric.value
        return totals

    def watch_encoder(self, raises: bool) -> None:
        self.unnoticed(_watch_encoder, raises)

    def unnoticed(self, function: "Callable[..., Any]", *args: Any) -> list[Any]:
        """Run a function in every worker. Through the engine it might have changed weights."""
        executor = self.llm.llm_engine.model_executor
        return executor.collective_rpc(function, args=args)  # type: ignore[no-any-return]

    def rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.llm.collective_rpc(method, kwargs=kwargs)

    def skip_teardown(self) -> None:
        self.skips_teardown = True

    def stop(self) -> None:
        # vLLM stops its scheduler and workers when the engine core shuts down; waiting for the
        # garbage collector would leave that to the interpreter's exit.
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()


def engine_class() -> Any:
    """`vllm.LLM`, whose import takes seconds."""
    from vllm import LLM

    return LLM


def _engine_prompt(prompt: dict[str, Any]) -> dict[str, Any]:
    engine_prompt: dict[str, Any] = {}
    if prompt["embeds"]:
        import numpy
        import torch

        engine_prompt["prompt_embeds"] = torch.from_numpy(numpy.load(prompt["embeds"]))
        if prompt["token_rows"]:
            engine_prompt["prompt_token_ids"] = prompt["ids"]
            engine_prompt["prompt_is_token_ids"] = prompt["token_rows"]
    else:
        engine_prompt["prompt_token_ids"] = prompt["ids"]
    if prompt["images"]:
        uuids = [image.pop("uuid") for image in prompt["images"]]
        pictures = [_picture(**image) for image in prompt["images"]]
        engine_prompt["multi_modal_data"] = {"image": pictures}
        if any(uuids):
            engine_prompt["multi_modal_uuids"] = {"image": uuids}
    if prompt["encoded"]:
        import torch

        grids = torch.tensor([image["grid"] for image in prompt["encoded"]])
        engine_prompt["multi_modal_data"] = {"image": {"image_grid_thw": grids}}
        engine_prompt["multi_modal_uuids"] = {
            "image": [image["name"] for image in prompt["encoded"]]
        }
    if prompt["cache_salt"]:
        engine_prompt["cache_salt"] = prompt["cache_salt"]
    return engine_prompt


def _picture(seed: int, width: int, height: int) -> Any:
    import numpy
    from PIL import Image

    # One colour for each patch of the models: patches differ, and their order shows.
    squares = (-(-height // SQUARE_PIXELS), -(-width // SQUARE_PIXELS), 3)
    colours = numpy.random.default_rng(seed).integers(0, 256, squares, numpy.uint8)
    pixels = colours.repeat(SQUARE_PIXELS, axis=0).repeat(SQUARE_PIXELS, axis=1)
    return Image.fromarray(pixels[:height, :width])


def _sampling(prompt: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    params = {name: prompt[name] for name in TRANSFER_PARAMS if prompt[name] is not None}
    return SamplingParams(
        max_tokens=prompt["max_tokens"],
        # Random weights choose the end token at random; lengths must be what the test asked for.
        ignore_eos=True,
        detokenize=False,
        logprobs=prompt["logprobs"],
        extra_args=params or None,
        **{"temperature": 0.0, **prompt["sampling"]},
    )


def _lora(path: str | None) -> Any:
    from vllm.lora.request import LoRARequest

    # vLLM tells adapters apart by a positive number.
    return path and LoRARequest(os.path.basename(path), zlib.crc32(path.encode()) // 2 + 1, path)


def _answer(output: Any) -> dict[str, Any]:
    best = output.outputs[0]
    return {
        "token_ids": list(best.token_ids),
        "logprobs": [
            {token: entry.logprob for token, entry in step.items()} for step in best.logprobs or []
        ],
        "prompt_logprobs": _of_prompt(output),
        "cached_tokens": output.num_cached_tokens,
        "finish_reason": best.finish_reason,
        "first_token_s": output.metrics.first_token_latency,
        # Answers of 0.23.0 have none of embeddings.
        **{name: getattr(output, name, None) for name in TRANSFER_PARAMS},
    }


def _of_prompt(output: Any) -> list[float]:
    """Return the log-probabilities after the first computed token; vLLM defines no others."""
    if output.prompt_logprobs is None:
        return []
    first = output.num_cached_tokens + 1
    tokens = zip(output.prompt_token_ids[first:], output.prompt_logprobs[first:], strict=True)
    return [entries[token].logprob for token, entries in tokens]


# Run in every worker, after the start: sizing the memory calls the encoder, too.


def _watch_encoder(worker: Any, raises: bool) -> None:
    model = worker.get_model()
    encode = model.embed_multimodal
    model.images_encoded = 0

    def watched(**inputs: Any) -> Any:
        if raises:
            raise RuntimeError("the vision encoder was called")
        embeddings = encode(**inputs)
        model.images_encoded += len(embeddings)
        return embeddings

    model.embed_multimodal = watched


def _images_encoded(worker: Any) -> int:
    return int(worker.get_model().images_encoded)


def _watch_drafts(worker: Any, loaded: int) -> None:
    """Fill the drafter's pages with NaN, and watch the probabilities from which it draws.

    From the first draft on, only the pages of the request's first `loaded` tokens may have NaN:
    vLLM's attention on CPUs reads rows behind a request's last one.
    """
    runner, drafter = worker.model_runner, worker.model_runner.drafter
    layers = runner.compilation_config.static_forward_context
    pages = [layers[name].kv_cache for name in drafter._draft_attn_layer_names]
    take, propose = drafter.take_last_draft_probs, drafter.propose
    counts = {"finite": 0, "other": 0}

    def watched_propose(**inputs: Any) -> Any:
        table = inputs["common_attn_metadata"].block_table_tensor[0]
        kept = table[: loaded // runner.cache_config.block_size].tolist()
        for each in pages:
            for block, rows in enumerate(each):
                if block not in kept:
                    rows.nan_to_num_()
        drafter.propose = propose
        return propose(**inputs)

    def watched_take() -> Any:
        drawn = take()
        if drawn is not None:
            finite = int(drawn.isfinite().all(dim=-1).sum())
            counts["finite"] += finite
            counts["other"] += drawn[..., 0].numel() - finite
        return drawn

    for each in pages:
        each.fill_(float("nan"))
    drafter.propose, drafter.take_last_draft_probs = watched_propose, watched_take
    drafter.probabilities = counts


def _draft_probabilities(worker: Any) -> dict[str, int]:
    return dict(worker.model_runner.drafter.probabilities)


# Ways of changing weights. Those that hand tensors to the model itself take norms alone: linear
# layers of CPU engines are packed, and only `reload_weights` prepares them for others.


def _tensors(path: str, suffix: str = "") -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors = load_file(os.path.join(path, "model.safetensors"))
    return {name: tensor for name, tensor in tensors.items() if name.endswith(suffix)}


def _load_norms(path: str) -> "Callable[[Any], None]":
    def load(model: Any) -> None:
        model.load_weights(_tensors(path, "norm.weight").items())

    return load


def _model_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def _by_path(llm: Any, path: str) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": path})


def _by_iterator(llm: Any, path: str) -> None:
    tensors = iter(_tensors(path).items())
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})


def _by_apply_model(llm: Any, path: str) -> None:
    llm.apply_model(_load_norms(path))


def _by_callable(llm: Any, path: str) -> None:
    load = _load_norms(path)
    llm.collective_rpc(lambda worker: load(worker.get_model()))


def _by_load_weights(llm: Any, path: str) -> None:
    _load_norms(path)(_model_of(llm))


def _by_parameters(llm: Any, path: str) -> None:
    parameters = dict(_model_of(llm).named_parameters())
    for name, tensor in _tensors(path, "norm.weight").items():
        parameters[name].data.copy_(tensor)


def _by_sleep(llm: Any, path: str) -> None:
    llm.sleep(2)
    llm.wake_up(["weights"])
    _by_path(llm, path)
    llm.wake_up(["kv_cache"])


def _by_tower(llm: Any, path: str) -> None:
    """The embeddings of a vision tower's patches alone."""
    tensors = _tensors(path, "_embedding") | _tensors(path, "position_embedding.weight")

    def load(worker: Any) -> None:
        parameters = dict(worker.get_model().named_parameters())
        for name, tensor in tensors.items():
            parameters[name].data.copy_(tensor)

    llm.collective_rpc(load)


SET_WEIGHTS: "dict[str, Callable[[Any, str], None]]" = {
    "path": _by_path,
    "iterator": _by_iterator,
    "apply_model": _by_apply_model,
    "callable": _by_callable,
    "load_weights": _by_load_weights,
    "parameters": _by_parameters,
    "sleep": _by_sleep,
    "tower": _by_tower,
}


def main(reply_fd: int) -> bool:
    """Serve until the input ends; whether the process is to end without its teardown."""
    child = Child()
    with os.fdopen(reply_fd, "w") as replies:
        for line in sys.stdin:
            op, argument = json.loads(line)
            try:
                reply = ["ok", child.ops[op](argument)]
            except Exception:  # reported to the test that asked
                reply = ["error", traceback.format_exc()]
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
        child.stop()
    return child.skips_teardown


if __name__ == "__main__":
    main(int(sys.argv[1]))
