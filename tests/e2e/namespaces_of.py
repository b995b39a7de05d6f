"""Prints the namespaces of engines that are configured and not started.

    python -m tests.e2e.namespaces_of MODEL '[{"enforce_eager": true}, ...]'

Each object has arguments of vLLM's `EngineArgs`. The platform is that of the interpreter's
environment. The answer is a JSON list on the last line.
"""

import json
import sys

from vllm.engine.arg_utils import EngineArgs

from vllm_kvpool.config import read_config
from vllm_kvpool.vllm_adapt.identity.namespace import engine_namespace


def main(model: str, engines: str) -> None:
    names = []
    for arguments in json.loads(engines):
        config = EngineArgs(
            model=model, dtype="float32", skip_tokenizer_init=True, **arguments
        ).create_engine_config()
        names.append(engine_namespace(config, read_config({}, env={}), [], []).namespace)
    print(json.dumps(names))


if __name__ == "__main__":
    main(*sys.argv[1:])
