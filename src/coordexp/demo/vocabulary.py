"""Two tokenizers with the 1,000 coordinate tokens: a small one for training, and the real one of Qwen.

Both are byte-level BPE with Qwen's chat and vision tokens. The small one has about 1,300 entries and is trained on
answers in the format of this project. With the real one, most of the cost of training on a CPU would be its
152,669 logits. The real one is rebuilt from the ranks in the `dashscope` wheel and is used in token-level tests,
because it merges punctuation as Qwen3-VL does.
"""

import importlib.util
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from coordexp.errors import UserError
from coordexp.vocab import COORD_TOKENS

Vocabulary = Literal["small", "qwen"]

# In Qwen's order, so that they get the same ids as in Qwen, after its 151,643 ranks.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN_ADDED_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

# How Qwen splits text before it merges bytes: contractions, words, single digits, punctuation, white space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(vocabulary: Vocabulary, *, coords: bool = True) -> PreTrainedTokenizerFast:
    """Return one of the two tokenizers, with or without the coordinate tokens."""
    core = _train_small() if vocabulary == "small" else _rebuild_qwen()
    added = [*SPECIAL_TOKENS] if vocabulary == "small" else [*SPECIAL_TOKENS, *PLAIN_ADDED_TOKENS]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    plain = [token for token in added if token not in SPECIAL_TOKENS] + [*(COORD_TOKENS if coords else ())]
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",  # noqa: S106
        pad_token="<|endoftext|>",  # noqa: S106
        additional_special_tokens=[*SPECIAL_TOKENS[1:]],
        model_max_length=131072,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def qwen_ranks_file() -> Path:
    """Return the path of `qwen.tiktoken` in the installed dashscope package, without importing the package."""
    spec = importlib.util.find_spec("dashscope")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "the real Qwen vocabulary is read from the dashscope package, which is not installed",
            "run pip install dashscope, or use the small vocabulary",
        )
    return Path(spec.submodule_search_locations[0]) / "resources" / "qwen.tiktoken"


def _rebuild_qwen() -> Tokenizer:
    core = TikTokenConverter(vocab_file=str(qwen_ranks_file()), pattern=SPLIT).converted()
    core.normalizer = normalizers.NFC()
    return core


def _train_small() -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"), _byte_level()]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300 + len(alphabet) // 8, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(_corpus(), trainer)
    return core


def _byte_level() -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _corpus() -> Iterator[str]:
    """Yield answers without their coordinates, and prompts. The same ones every time."""
    colours = ("red", "green", "blue", "yellow", "purple", "orange", "black", "white")
    shapes = ("circle", "square", "triangle", "star", "hexagon", "cross")
    names = [f"{colour} {shape}" for colour, shape in itertools.product(colours, shapes)]
    chooser = random.Random(0)  # noqa: S311
    for _ in range(400):
        objects = []
        for number, name in enumerate(chooser.sample(names, chooser.randint(1, 30)), start=1):
            geometry = (
                '"bbox_2d": ["", "", "", ""]' if chooser.random() < 0.6 else '"poly": ["", "", "", "", "", ""]'
            )
            fields = [f'"desc": "{name}"', geometry]
            objects.append(f'"object_{number}": {{{", ".join(fields)}}}')
        yield "{" + ", ".join(objects) + "}"
        yield "user\nDetect all objects.\nassistant\n"
