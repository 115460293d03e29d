"""An instruction with `instances`: a list of {input, output}, each of which makes a row."""

from snaketune.corpus.rows import Conversation, Malformed, Outcome
from snaketune.corpus.values.cells import first_key, wrong_type
from snaketune.corpus.values.prompts import PARTS, exchange
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Column, Schema, Values, Variant

RESPONSES = ("output", "response", "completion")


def read(values: Values, file: RowFile) -> list[Outcome]:
    instances = values["instances"]
    if not isinstance(instances, list):
        raise wrong_type("instances", instances, "a list of input and output")
    if not instances:
        raise Malformed("no_instances", "instances is empty, so there is no response")
    rows: list[Outcome] = []
    for number, instance in enumerate(instances, start=1):
        try:
            if not isinstance(instance, dict):
                raise wrong_type(f"instance {number}", instance, "input and output")
            rows.append(_row(values, instance, file))
        except Malformed as error:
            rows.append(Malformed(error.reason, f"instance {number}: {error.detail}"))
    return rows


def _row(values: Values, instance: Values, file: RowFile) -> Conversation:
    response = first_key(instance, RESPONSES)
    if response is None:
        raise Malformed("missing_column", "no output, or it is null")
    parts = {
        key: instance[key] for key in ("input", *(column.key for column in PARTS)) if instance.get(key) is not None
    }
    prompt, (turns,), notes = exchange(values | parts, {response: instance[response]}, file)
    return Conversation(messages=prompt + turns, notes=notes)


INSTANCES = Column("prompt", "instruction"), Column("instances", "instances")
SCHEMA = Schema("instances", read, Variant("prompt instances", *INSTANCES, *PARTS[1:]))
