"""Imports vLLM before the tests do: what it and torch warn of while being imported is not ours."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.engine.arg_utils
    import vllm.v1.request  # noqa: F401 - imported for its effect
