"""Ask a trained model, with transformers: python resources/serve/chat.py results/dpo/demo/model 'Add 2 and 3.'

MODEL is a `model/` folder of results, or a repository on the Hub that one was pushed to. A folder with an adapter alone is
loaded on the base that the adapter names; `--base` names another one, such as a model folder of results. A GPU is used if
there is one. As in evaluations, the most likely token is taken each time, and a CPU computes in float32; on a GPU, two likely
tokens may change places within rounding.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, pipeline

# Of a saved model on a GPU; on a CPU, what evaluations compute in.
DTYPE = "auto" if torch.cuda.is_available() else torch.float32


def load(model: str, base: str | None = None) -> pipeline:
    """Load the model with its own tokenizer; for some families, AutoTokenizer would build another one."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    adapter = Path(model) / "adapter/adapter_config.json"
    if not adapter.is_file() or any(Path(model).glob("*.safetensors")):
        return pipeline("text-generation", model=model, tokenizer=tokenizer, dtype=DTYPE)
    from peft import PeftModel

    named = json.loads(adapter.read_text(encoding="utf-8"))
    base = base or named["base_model_name_or_path"]
    if base is None:
        raise SystemExit(f"{model} is an adapter on a model of results; name that model folder with --base")
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=DTYPE)
    if len(tokenizer) > whole.get_input_embeddings().num_embeddings:
        whole.resize_token_embeddings(len(tokenizer))
    whole = PeftModel.from_pretrained(whole, str(adapter.parent)).merge_and_unload()
    return pipeline("text-generation", model=whole, tokenizer=tokenizer)


def answer(model: pipeline, prompt: str, tokens: int) -> str:
    """What the model says to one user's turn, greedily."""
    messages = [{"role": "user", "content": prompt}]
    said = model(messages, max_new_tokens=tokens, do_sample=False, return_full_text=False)
    return said[0]["generated_text"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("prompt", nargs="+", metavar="PROMPT")
    parser.add_argument("--base", metavar="MODEL", help="what an adapter lies on, where it doesn't say that itself")
    parser.add_argument("--tokens", type=int, default=64, help="where an answer ends at the latest (default: 64)")
    options = parser.parse_args()
    loaded = load(options.model, options.base)
    for one in options.prompt:
        print(answer(loaded, one, options.tokens))
