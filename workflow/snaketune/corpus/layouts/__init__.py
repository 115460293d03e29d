"""Raw rows to canonical rows: by the columns of a known layout, or by the `fields` that the config maps.

Each row is recognised (`recognise`), read by its layout (`readers`), repaired where the config says so (`repair`) and checked
(`validation`); `canonical` does this for the rows of a file. Documents have one layout and a module of their own.

    messages          messages: [{role, content}, ...]; content a text or typed parts
    sharegpt          conversations: [{from, value}, ...], or items that are two turns: {human, assistant}
    turns             turns: [{speaker, utterance}, ...], where SYSTEM is the assistant
    dialogue          one text column with a whole dialogue: "User 1: ...", "User 2: ...", or in a template
    alpaca            instruction, input (or context), output (or response, completion)
    instances         instruction with instances: [{input, output}, ...], each of which gives a row
    prompt-response   prompt or question with response or completion; further names in `exchanges`
    message-tree      message_id, parent_id, role, text, rank; or a message with its replies inside
    pairs             a prompt with chosen and rejected, each a text, a message or turns; the prompt is a text, or a
                      conversation in messages or conversations; or chosen and rejected are whole conversations, whose
                      shared beginning is the prompt; further names in `preference_pairs`
    transcripts       chosen and rejected as "\\n\\nHuman: ...\\n\\nAssistant: ..." texts, which begin alike
    votes             a prompt, response1 and response2 (or _a and _b), and the annotators' verdicts
    unpaired          a prompt with its completion, or a whole conversation, and a label: true or false, 1 or 0, or a
                      text that means one of them

`answer` and `task` columns become labels unless they are the response itself, `history` is the turns before the prompt, a
`system` column is the system turn, and a `tools` column holds the tools that the prompt offers. Context and choices beside a
prompt are added to it, reasoning beside a response to the response (`context_columns`). Ratings of both completions of a pair
must agree with which was chosen (`ratings`), and a row with images or audio is refused (`media`). A null column counts as
absent; other columns that aren't read are reported (`unread_columns`). Lists of turns may be JSON in a text, as in a CSV.
"""
