"""The tables of a sample.

    prompts.arrow     id (of the corpus' row), turn (how many turns precede the response), corpus, messages, tools,
                      template_variables, task, answer (the checkable one of the corpus), reference (the corpus' own response),
                      tokens, digest (32 hex digits, of the tokens)
    part              responses.arrow of a part: digest binary[16] (of prompt and index), text, tokens, ended, logp
    responses.arrow   id, turn, prompt (digest of its tokens), index, text, reasoning, content, tool_calls (JSON),
                      tokens, ended ("stop" or "length"), logp (nats, summed over the tokens), answer, reference

    replies.arrow     id, turn, index, reply (of a judge), asked (how often)
    scores.arrow      id, turn, index; score and further numbers of a scorer (null: no score)

A response's log-probability is the policy's, at temperature 1; null where a server returns none.
"""

import pyarrow as pa

from snaketune.corpus.rows import TURN

PROMPTS, RESPONSES, SCORES, SELECTED = "prompts.arrow", "responses.arrow", "scores.arrow", "selected.jsonl"
REPLIES = "replies.arrow"
# Texts of the corpus that prompts carry along.
OF_ROW = ("tools", "template_variables", "task", "answer", "reference")
PROMPT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("turn", pa.int32()),
        ("corpus", pa.string()),
        ("messages", pa.list_(pa.struct(TURN))),
        *((name, pa.string()) for name in OF_ROW),
        ("tokens", pa.list_(pa.int32())),
        ("digest", pa.string()),
    ]
)
GENERATED = [("tokens", pa.list_(pa.int32())), ("ended", pa.string()), ("logp", pa.float64())]
PART_SCHEMA = pa.schema([("digest", pa.binary(16)), ("text", pa.string()), *GENERATED])
RESPONSE_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("turn", pa.int32()),
        ("prompt", pa.string()),
        ("index", pa.int32()),
        *((name, pa.string()) for name in ("text", "reasoning", "content", "tool_calls")),
        *GENERATED,
        ("answer", pa.string()),
        ("reference", pa.string()),
    ]
)
# Columns that identify a response in tables of scores and replies.
SCORE_FIELDS = [("id", pa.string()), ("turn", pa.int32()), ("index", pa.int32())]
KEYS, SCORE = [name for name, _ in SCORE_FIELDS], "score"
REPLY_SCHEMA = pa.schema([*SCORE_FIELDS, ("reply", pa.string()), ("asked", pa.int32())])
