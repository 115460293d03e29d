"""The table of layouts. A new one is a module of its own, a line here, its name in the config, and a row in the tests."""

from snaketune.corpus.layouts import (
    contents,
    dialogue,
    instances,
    message_rows,
    message_tree,
    messages,
    moss,
    pairs,
    prompt_response,
    rated,
    text,
    turns,
    unpaired,
    votes,
)

LAYOUTS = {
    module.SCHEMA.name: module.SCHEMA
    for module in (
        messages,
        turns,
        contents,
        moss,
        dialogue,
        prompt_response,
        instances,
        message_tree,
        message_rows,
        pairs,
        votes,
        rated,
        text,
        unpaired,
    )
}
