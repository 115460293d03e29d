"""Raw rows to canonical ones: by the columns that a layout names, or by the `fields` that the config maps.

A row is recognised (`recognise`), read by its layout (`readers`), mended where the config asks for it (`repair`) and checked
(`soundness`); `canonical` does so for the rows of a file. Documents have one layout and a module of their own.

    messages          messages: [{role, content}, ...]; content a text or typed parts
    sharegpt          conversations: [{from, value}, ...], or items that are two turns: {human, assistant}
    turns             turns: [{speaker, utterance}, ...], where SYSTEM is the assistant
    dialogue          one text column with a whole dialogue: "User 1: ...", "User 2: ...", or in a template
    alpaca            instruction, input (or context), output (or response, completion)
    instances         instruction with instances: [{input, output}, ...], each of which makes a row
    prompt-response   prompt or question with response or completion; further names in `exchanges`
    message-tree      message_id, parent_id, role, text, rank; or a message with its replies inside
    pairs             a prompt with chosen and rejected, each a text, a message or turns; the prompt is a text, or a
                      conversation in messages or conversations; or chosen and rejected are whole conversations, whose
                      shared beginning is the prompt; further names in `pairs`
    transcripts       chosen and rejected as "\\n\\nHuman: ...\\n\\nAssistant: ..." texts, which begin alike
    votes             a prompt, response1 and response2 (or _a and _b), and who liked which better
    unpaired          a prompt with its completion, or a whole conversation, and a label: true or false, 1 or 0, or a
                      text that means one of them

`answer` and `task` columns are taken along wherever they aren't the response itself, `history` is what was said before
a prompt, a `system` column is the system turn, and a `tools` column is what the prompt offers to call. Context and choices
beside a prompt are part of it, reasoning beside a response is part of that (`beside`). Ratings of both completions of a
pair must agree with which was chosen (`ratings`), and a row with pictures or sounds is refused (`media`). A null column
counts as absent; what else isn't read is named (`unread`). Lists of turns may be written into a text as JSON, as CSV
needs it.
"""
