"""Speakers: the names that data sets use, and the role of each.

A name is accepted only where it is usual: for instance no message is by an "instruction".
"""

from collections.abc import Mapping

Speakers = Mapping[str, str]

# Names in lists of messages, by role.
NAMES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "ai"),
    "tool": (
        *("tool", "function", "observation", "tool_response", "function response", "tool response", "tool result"),
        *("tool output", "ipython"),
    ),
}
ROLES = {name: role for role, names in NAMES.items() for name in names}
# Speakers whose text is only a call, which the assistant makes.
CALLERS = ("function_call", "tool_call")
# Names at the beginning of a line of a dialogue. The first two that aren't in ROLES are the user and the assistant.
DIALOGUE_SPEAKERS = (
    r"(?:User|Human|Speaker|Person|Participant|Character)[ _]?[12AB]|User|Human|Assistant|Chatbot|Bot|GPT|AI"
)
# Tool results, which would else be part of the turn before.
DIALOGUE_SPEAKERS += r"|(?:Function|Tool)(?:[ _](?:Response|Result|Output))?|Observation"


def role_of(speaker: str, speakers: Speakers) -> str | None:
    """Return the role of a speaker, or None; names are matched without regard to case, except in `speakers`."""
    return speakers.get(speaker) or ROLES.get(speaker) or ROLES.get(speaker.lower())
