"""Which templates write contents unchanged, proved from their syntax trees."""

import pytest
from small_tokenizers import CHATML, LLAMA3, MISTRAL, PHI3

from snaketune.tokenization.batched.verbatim import NotVerbatim, check_verbatim

# Llama 3's is LLAMA3; others are like those of Gemma, Zephyr and Qwen 2.5.
PLAIN = {
    **{path.stem: path.read_text() for path in (CHATML, MISTRAL, PHI3)},
    "llama3": LLAMA3,
    "gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns') }}{% endif %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}{{ '<t>' + role + '\\n' + message['content'] | trim + '</t>\\n' }}"
    "{% endfor %}",
    "zephyr": "{% for m in messages %}\n{% if m['role'] == 'user' %}\n{{ '<|user|>\\n' + m['content'] + eos_token }}\n"
    "{% elif loop.last and add_generation_prompt %}\n{{ m.content.strip() ~ eos_token }}\n{% endif %}\n{% endfor %}",
    "qwen": "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{% if message.role == 'user' or message.role == 'assistant' and not message.tool_calls %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}{% elif 'name' in message %}"
    "{{ message.get('name', '') }}{% endif %}{% endfor %}",
    "counting": "{% for m in messages[1:] %}{{ messages | length }}{{ m.content if m.content is string else '' }}"
    "{{ loop.previtem.role }}{{ (messages | selectattr('role', 'equalto', 'user') | list | last).content }}{% endfor %}",
    "empty": "{% set ns = namespace(said='') %}{% for m in messages %}{% if m.content %}{% set ns.said = m.content ~ ' ' %}"
    "{% endif %}{{ ns.said }}{% endfor %}",
}
NOT_VERBATIM = {
    "the filter length": "{{ m.content | length }}",
    "the filter upper": "{{ m.content | upper }}",
    "more with a content": "{% if m.content == 'x' %}a{% endif %}",
    "more with a content than": "{% if '</think>' in m.content %}a{% endif %}",
    "more with a content .*line 1": "{{ '%s' % m.content }}",
    "takes a part of a content": "{{ m.content[0] }}",
    "the method split": "{{ m.content.split('x')[0] }}",
    "the method items": "{% for key, value in m.items() %}{{ value }}{% endfor %}",
    "through the filter tojson": "{{ messages | tojson }}",
    "writes out a whole message": "{{ m }}",
    "loops over": "{% for c in m.content %}{{ c }}{% endfor %}",
    "Macro": "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(m.content) }}",
    "AssignBlock": "{% set x %}{{ m.content }}{% endset %}{{ x | length }}",
    "a method of a message": "{% set key = 'content' %}{{ m[key] | length }}",
    "tests whether": "{% if m.content is upper %}a{% endif %}",
    "the filter map": "{{ messages | map(attribute='content') | join }}",
    "adds to a list": "{% for x in messages + messages %}{{ x.content }}{% endfor %}",
    "template does more": "{% if loop.previtem.content > 'a' %}{% endif %}",
    "filter length": "{% set ns = namespace(a='') %}{% set ns.a = ns.a + m.content %}{{ ns.a | length }}",
    "as a message and as a content": "{% set m = m.content %}{{ m }}",
    "does more with": "{% set x = {'a': m.content} %}{{ x.a | length }}",
}


@pytest.mark.parametrize("name", PLAIN)
def test_templates_that_write_contents_unchanged_are_accepted(name):
    check_verbatim(PLAIN[name])


@pytest.mark.parametrize("reason", NOT_VERBATIM)
def test_other_uses_of_a_content_are_refused_with_the_reason(reason):
    with pytest.raises(NotVerbatim, match=reason):
        check_verbatim("{% for m in messages %}" + NOT_VERBATIM[reason] + "{% endfor %}")


def test_kinds_of_variables_carry_over_loop_iterations():
    """The first iteration assigns a content, the second one measures it."""
    with pytest.raises(NotVerbatim, match="length"):
        check_verbatim(
            "{% set ns = namespace(a='') %}{% for m in messages %}{{ ns.a | length }}{% set ns.a = m.content %}{% endfor %}"
        )
