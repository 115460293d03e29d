"""What is wrong with a config, in plain words: pydantic's errors as lines with key, value found and what was expected."""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from snaketune.config.base import Model
from snaketune.config.foreign_names import FOREIGN_NAMES
from snaketune.config.workflow import Workflow
from snaketune.suggestions import unknown

# pydantic puts the members of a union into the location of an error, between the keys: names of models, and these.
MEMBER_OF_UNION = re.compile(r"(literal|tuple|constrained|function-after)\b.*|bool|int|float|str")
# Types of pydantic's errors by what a value should be. `{}` are values of the error's context.
EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "a text",
    "dict_type": "a section of entries, each under a name",
    "literal_error": "{expected}",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "at most {le}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "string_too_short": "a text of at least {min_length} characters",
    "string_too_long": "a text of at most {max_length} characters",
}
SECTION_ERRORS = ("model_type", "model_attributes_type")
# Patterns of names and references, by what is in them.
FORMS = (
    ("(base|sft|dpo|merge|reward):", "a model: base:NAME, sft:NAME, dpo:NAME, merge:NAME or reward:NAME"),
    ("(base|sft|dpo|merge):", "a model: base:NAME, sft:NAME, dpo:NAME or merge:NAME"),
    ("(sft|dpo|merge):", "a model: sft:NAME, dpo:NAME or merge:NAME"),
    ("(sft|dpo):", "a model: sft:NAME or dpo:NAME"),
    ("^sft:", "a training: sft:NAME"),
    ("^reward:", "a reward model: reward:NAME"),
    ("/[A-Za-z0-9]", "a repository of the Hub: owner/name"),
    ("(?:@0", "a name of letters, digits, `_`, `.` and `-`"),
)
SHOWN_CHARACTERS, SHOWN_KEYS = 120, 6
# The key of an error in no single key.
TOP_LEVEL = "(top level)"


def lines_of(error: ValidationError, root: type[Model] = Workflow) -> list[str]:
    """One line per key, sorted. Args: root: the model that was validated."""
    issues = defaultdict[str, list[Any]](list)
    for issue in error.errors():
        if not _is_echo(issue):
            issues[_key(issue["loc"], root)].append(issue)
    for key in list(issues):
        # Of a section or a word, such as `false`, a section was found: its own errors say what is wrong.
        if isinstance(issues[key][0]["input"], dict) and any(other.startswith(f"{key}.") for other in issues):
            issues[key] = [issue for issue in issues[key] if issue["type"] != "literal_error"]
    return sorted({line for key, found in issues.items() for line in _lines(key, found, root)})


def _key(location: tuple[Any, ...], root: type[Model]) -> str:
    """The key of an error as a user writes it."""
    models = [root]
    names: list[str] = []
    for part in location:
        if named := [model for model in models if model.__name__ == part]:
            models = named
        elif not (names and isinstance(part, str) and MEMBER_OF_UNION.fullmatch(part)):
            names.append(str(part))
            models = _models_under(part, models)
    return ".".join(names) or TOP_LEVEL


def _lines(key: str, issues: list[Any], root: type[Model]) -> list[str]:
    lines: list[str] = []
    expected: list[str] = []
    for issue in issues:
        match issue["type"]:
            case "extra_forbidden":
                lines.append(f"{key}: unknown key{_meant(str(issue['loc'][-1]), issue['loc'], root)}")
            case "missing":
                lines.append(f"{key}: is missing")
            case "value_error":
                lines.append(f"{key}: {issue['ctx']['error']}")
            case _:
                expected.append(_expected(issue, root))
    if expected:
        found = repr(issues[0]["input"])[:SHOWN_CHARACTERS]
        lines.append(f"{key}: found {found}; expected {' or '.join(dict.fromkeys(expected))}")
    return lines


def _expected(issue: Mapping[str, Any], root: type[Model]) -> str:
    kind, context = issue["type"], issue.get("ctx", {})
    if kind in EXPECTED:
        return EXPECTED[kind].format(**context)
    if kind in ("tuple_type", "list_type"):
        found = issue["input"]
        return f"a list: [{found}]" if isinstance(found, str | int | float) else "a list: each item after a `-`"
    if kind in SECTION_ERRORS:
        # With the keys of all members of a union.
        models = _models_beside((*_key(issue["loc"], root).split("."), ""), root)
        return f"a section with keys such as {', '.join([str(key) for model in models for key in _keys(model)][:SHOWN_KEYS])}"
    if kind == "string_pattern_mismatch":
        pattern = context["pattern"]
        return next((words for part, words in FORMS if part in pattern), f"a text that matches {pattern}")
    return issue["msg"][:1].lower() + issue["msg"][1:]


def _is_echo(issue: Any) -> bool:
    """Whether an error repeats another one of the same value."""
    # Of a union of a value and a list of values, only the matching member's error is meaningful.
    member, found = str(issue["loc"][-1]) if issue["loc"] else "", issue["input"]
    of_value = member.startswith(("constrained", "literal"))
    if isinstance(found, list) if of_value else issue["type"] == "tuple_type":
        return "constrained" in member or member.startswith("tuple[constrained")
    # A list is also reported as too short if its items are invalid.
    return issue["type"] == "too_short" and len(found) >= issue["ctx"]["min_length"]


def _meant(key: str, location: tuple[Any, ...], root: type[Model]) -> str:
    """A suffix on what an unknown key may stand for: a key of a section beside it, a name in another library, or a typo."""
    models = _models_beside(location, root)
    if deeper := [f"{name}.{key}" for name, sections in _sections(models) if key in _keys_of(sections)]:
        return f"; did you mean {' or '.join(map(repr, deeper))}?"
    if key in FOREIGN_NAMES:
        return f"; here it is {FOREIGN_NAMES[key]}"
    return unknown(key, _keys_of(models))


def _models_beside(location: tuple[Any, ...], root: type[Model]) -> list[type[Model]]:
    """The models that the last part of `location` may be a key of."""
    models = [root]
    for part in location[:-1]:
        models = [model for model in models if model.__name__ == part] or _models_under(part, models)
    return models


def _models_under(part: Any, models: list[type[Model]]) -> list[type[Model]]:
    """The models under a key of one of these models; the same ones under a name of an entry, or a position in a list."""
    sections = {key: annotation for model in models for key, annotation in _keys(model).items()}
    return _models_in(sections.get(part)) or models


def _sections(models: list[type[Model]]) -> list[tuple[str, list[type[Model]]]]:
    keys = [(name, _models_in(annotation)) for model in models for name, annotation in _keys(model).items()]
    return [(name, sections) for name, sections in keys if sections]


def _keys_of(models: list[type[Model]]) -> set[str]:
    return {key for model in models for key in _keys(model)}


def _keys(model: type[Model]) -> dict[Any, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _models_in(annotation: Any) -> list[type[Model]]:
    if isinstance(annotation, type) and issubclass(annotation, Model):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
