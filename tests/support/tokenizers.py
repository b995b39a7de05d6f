"""A tokenizer for the tiny models, so that servers of theirs take text and chats.

Byte-level BPE, as Llama 3 and Qwen have: any bytes are tokens, and a character outside of ASCII may
be several, which is what streams of text have to get right. Trained on `CORPUS`, so the same
everywhere.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.models import write_json

VOCAB = 400
BEGIN, END = "<|begin|>", "<|end|>"
CORPUS = (
    "the pool holds what one engine has computed and another one finds it there",
    "a prompt is cut into chunks and every chunk into cells of one head and some layers",
    "requests are answered in the order in which they came unless somebody is in a hurry",
    "tell me a story about a router that never lost a token of any stream",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 100 200 300 1000",
)
TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}: {{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)


def add_tokenizer(model: Path, vocab: int = VOCAB) -> Path:
    """Write a tokenizer of at most `vocab` tokens into a model's directory; returns it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BEGIN, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(model / "tokenizer.json"))
    write_json(
        model / "tokenizer_config.json",
        {
            **{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END},
            "chat_template": TEMPLATE,
        },
    )
    return model
