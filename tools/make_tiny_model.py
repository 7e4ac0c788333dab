"""Make a random 4-layer Qwen3-style model with a character tokenizer, for quick trials and tests.

    python tools/make_tiny_model.py models/tiny

It knows nothing. Its vocabulary is the 14 characters of short sums such as "2+1=", so that random
answers are right often enough for reinforcement learning to start from.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

CHARACTERS = "0123456789+-*="
PAD, EOS = "<pad>", "<eos>"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; text with any other character raises an error."""
    vocabulary = {token: index for index, token in enumerate((PAD, EOS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def make_tiny_model(destination: Path, *, seed: int = 0) -> None:
    """Save an fp32 checkpoint (0.2 M parameters, 2 key-value heads) and its tokenizer.

    Args:
        destination: the directory to write; it is created.
        seed: of the random weights.
    """
    tokenizer = character_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("destination", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    destination: Path = arguments.destination
    if destination.exists():
        print(f"{destination} is there")
        return
    disable_progress_bar()
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".partial-") as scratch:
        finished = Path(scratch) / destination.name
        make_tiny_model(finished, seed=arguments.seed)
        finished.rename(destination)
    print(f"saved {destination}")


if __name__ == "__main__":
    main()
