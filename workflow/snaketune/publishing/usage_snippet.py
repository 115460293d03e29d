"""The code in a model card that loads the model; a test runs it."""

import json

from snaketune.publishing.card_results import CardResults

HERE = 'MODEL = "."  # the folder with these files, or the repository on the Hub as owner/name'


def usage(results: CardResults) -> str:
    """The section on usage, with code."""
    text = (
        _base_sentence(results) if results.is_adapter else "The model is complete: transformers needs no other files."
    )
    if _trusts_remote_code(results):
        text += " The model has its own Python code, which `trust_remote_code` runs: read it first."
    return f"{text}\n\n```python\n{_code(results)}\n```"


def _base_sentence(results: CardResults) -> str:
    """The base model of the adapter, as a sentence."""
    base_runs = results.trainings[1:]
    if results.model.spec.get("continued"):
        # A continued adapter replaces the adapter of the SFT run.
        base_runs = base_runs[1:]
    if base_runs:
        base = f"the result of `{base_runs[0].job.stage}:{base_runs[0].job.name}`"
        base += ", an adapter itself, merged" if "base_dtype" in base_runs[0].manifest else ""
    else:
        base = "the model that its training started from"
    return (
        f"The repository has only an adapter, in `adapter/`, and the tokenizer. Its base is {base}; set `BASE` to it."
    )


def _code(results: CardResults) -> str:
    # For this family, AutoTokenizer would use the family's own class, which tokenizes differently.
    made_here = results.base.get("architecture") == "qwen2"
    tokenizer = "PreTrainedTokenizerFast" if made_here else "AutoTokenizer"
    trust = ", trust_remote_code=True" if _trusts_remote_code(results) else ""
    lines = ["from peft import PeftModel"] if results.is_adapter else []
    lines += [
        f"from transformers import AutoModelForCausalLM, {tokenizer}",
        "",
        HERE,
        f"tokenizer = {tokenizer}.from_pretrained(MODEL{trust})",
    ]
    if results.is_adapter:
        lines += [
            _base(results),
            f'model = AutoModelForCausalLM.from_pretrained(BASE, dtype="auto"{_revision(results)}{trust})',
            "if len(tokenizer) > model.get_input_embeddings().num_embeddings:",
            "    model.resize_token_embeddings(len(tokenizer))",
            'model = PeftModel.from_pretrained(model, MODEL, subfolder="adapter")',
        ]
    else:
        lines.append(f'model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto"{trust})')
    return "\n".join([*lines, *_generation_lines(results)])


def _base(results: CardResults) -> str:
    base = results.base_on_hub
    # A Hub id has no characters that need escaping in a Python string.
    return f'BASE = "{base["path"]}"' if base and _has_plain_base(results) else 'BASE = "..."  # see above'


def _revision(results: CardResults) -> str:
    base = results.base_on_hub
    return (
        f", revision={json.dumps(base['revision'])}" if base and base["revision"] and _has_plain_base(results) else ""
    )


def _has_plain_base(results: CardResults) -> bool:
    """Return True if the adapter's base is the base model itself."""
    return len(results.trainings) == 1 or bool(results.model.spec.get("continued"))


def _generation_lines(results: CardResults) -> list[str]:
    if all(corpus.spec["kind"] == "text" for corpus in results.corpora):
        prompt = 'prompt = tokenizer("Once upon a time", return_tensors="pt")'
        return [
            prompt,
            "answer = model.generate(**prompt, max_new_tokens=64)",
            "print(tokenizer.decode(answer[0], skip_special_tokens=True))",
        ]
    return [
        'messages = [{"role": "user", "content": "Hello!"}]',
        "prompt = tokenizer.apply_chat_template(",
        '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
        ")",
        "answer = model.generate(**prompt, max_new_tokens=64)",
        'print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]


def _trusts_remote_code(results: CardResults) -> bool:
    return bool(results.model.spec.get("trust_remote_code"))
