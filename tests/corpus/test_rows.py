"""Content hashes distinguish rows."""

from snaketune.corpus.rows import Conversation, Preference, content_hash


def turns(*texts):
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 3, texts)]


def test_content_and_roles_distinguish_rows():
    say = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [
        Conversation(messages=turns("ab", "c")),
        Conversation(messages=turns("a", "bc")),
        Conversation(messages=turns("a", "b", "c", "d")),
        Conversation(messages=turns("a", "b9:assistant1:c")),
        Conversation(messages=turns("user:1:a", "b")),
        Conversation(messages=[{"role": "system", "content": "a"}, *turns("b", "c")]),
        Preference(prompt=say[:1], chosen=turns("b", "c"), rejected=turns("d")),
        Preference(prompt=say[:1], chosen=turns("b"), rejected=turns("c", "d")),
        Preference(prompt=say, chosen=turns("c"), rejected=turns("d")),
    ]
    assert len({content_hash(row) for row in rows}) == len(rows)
    assert content_hash(Conversation(messages=turns("a", "b"), answer="b", task="t")) == content_hash(
        Conversation(messages=turns("a", "b"))
    )
