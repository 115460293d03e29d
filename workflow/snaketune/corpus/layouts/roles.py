"""Who speaks: all names that data sets have for a speaker, and the role that each stands for.

A name is known where it is usual, and nowhere else: no message is by an "instruction".
"""

from collections.abc import Mapping

Speakers = Mapping[str, str]
NO_SPEAKERS: Speakers = {}

# In lists of messages.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function response": "tool",
    "tool response": "tool",
    "tool result": "tool",
    "tool output": "tool",
    "ipython": "tool",
}
# Speakers whose text is nothing but a call, which the assistant makes.
CALLERS = ("function_call", "tool_call")
# Between a user and a system, the system is who answers.
SYSTEM_ANSWERS = {"SYSTEM": "assistant", "System": "assistant", "system": "assistant"}
# In the marks of chat templates; a template with any other speaker can't be taken off.
TEMPLATE_ROLES = {name: ROLES[name] for name in ("system", "user", "human", "assistant", "model", "bot", "ai")}
TEMPLATE_ROLES |= {
    "chatbot": "assistant",
    "instruction": "user",
    "inst": "user",
    "response": "assistant",
    "/inst": "assistant",
}
# Within the marks of templates that aren't known.
ASSISTANTS_IN_MARKS = "assistant|chatbot|model|gpt|bot"
# At the beginning of a line of a dialogue. Those that aren't among ROLES are the user and the assistant, as they come.
DIALOGUE_SPEAKERS = (
    r"(?:User|Human|Speaker|Person|Participant|Character)[ _]?[12AB]|User|Human|Assistant|Chatbot|Bot|GPT|AI"
)
# Whoever else speaks, so that it isn't taken for what the speaker before says.
DIALOGUE_SPEAKERS += r"|(?:Function|Tool)(?:[ _](?:Response|Result|Output))?|Observation"


def role_of(speaker: str, speakers: Speakers = NO_SPEAKERS) -> str | None:
    """The role of a speaker, or None; how it is capitalised matters only in `speakers`."""
    return speakers.get(speaker) or ROLES.get(speaker) or ROLES.get(speaker.lower())
