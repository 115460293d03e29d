"""The lines by which a card says how its model is loaded; a test runs them."""

import json

from snaketune.publishing.card_results import Told

HERE = 'MODEL = "."  # the folder with these files, or the repository on the Hub as owner/name'


def loading(told: Told) -> str:
    """The section's text, with code."""
    said = _beneath(told) if told.is_adapter else "It is complete: transformers needs nothing else."
    if _trusts(told):
        said += " The model comes with Python code of its own, which `trust_remote_code` runs: read it first."
    return f"{said}\n\n```python\n{_code(told)}\n```"


def _beneath(told: Told) -> str:
    """What the adapter lies on, in words."""
    below = told.trainings[1:]
    if told.model.spec.get("continued"):
        # In the place of the SFT run's adapter, and not upon it.
        below = below[1:]
    if below:
        where = f"the result of `{below[0].job.stage}:{below[0].job.name}`"
        where += ", an adapter itself, merged" if "base_dtype" in below[0].manifest else ""
    else:
        where = "the model that it began with"
    return f"This is an adapter alone, in `adapter/`, with the tokenizer. It lies on {where}, which `BASE` names."


def _code(told: Told) -> str:
    # Of a folder of this family AutoTokenizer takes the family's own class, which cuts texts otherwise.
    made_here = told.base.get("architecture") == "qwen2"
    tokenizer = "PreTrainedTokenizerFast" if made_here else "AutoTokenizer"
    trust = ", trust_remote_code=True" if _trusts(told) else ""
    lines = ["from peft import PeftModel"] if told.is_adapter else []
    lines += [
        f"from transformers import AutoModelForCausalLM, {tokenizer}",
        "",
        HERE,
        f"tokenizer = {tokenizer}.from_pretrained(MODEL{trust})",
    ]
    if told.is_adapter:
        lines += [
            _base(told),
            f'model = AutoModelForCausalLM.from_pretrained(BASE, dtype="auto"{_revision(told)}{trust})',
            "if len(tokenizer) > model.get_input_embeddings().num_embeddings:",
            "    model.resize_token_embeddings(len(tokenizer))",
            'model = PeftModel.from_pretrained(model, MODEL, subfolder="adapter")',
        ]
    else:
        lines.append(f'model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto"{trust})')
    return "\n".join([*lines, *_generating(told)])


def _base(told: Told) -> str:
    base = told.base_on_hub
    # A Hub id holds nothing that a text of Python could take amiss.
    return f'BASE = "{base["path"]}"' if base and _is_alone(told) else 'BASE = "..."  # see above'


def _revision(told: Told) -> str:
    base = told.base_on_hub
    return f", revision={json.dumps(base['revision'])}" if base and base["revision"] and _is_alone(told) else ""


def _is_alone(told: Told) -> bool:
    """Whether the adapter is put on the base itself."""
    return len(told.trainings) == 1 or bool(told.model.spec.get("continued"))


def _generating(told: Told) -> list[str]:
    if all(corpus.spec["kind"] == "text" for corpus in told.corpora):
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


def _trusts(told: Told) -> bool:
    return bool(told.model.spec.get("trust_remote_code"))
