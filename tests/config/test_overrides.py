"""Single keys of a config, set by their whole names."""

import pytest

from snaketune.config.overrides import apply_overrides
from snaketune.errors import SnaketuneError

CONFIG = {
    "corpora": {"chat": {"sources": [{"files": ["a"]}, {"files": ["b"]}]}},
    "dpo": {"aligned": {"beta": 0.1, "training": {"epochs": 1}}, "qwen2.5__x": {"beta": 0.2}},
}


@pytest.mark.parametrize(
    ("key", "value", "path"),
    [
        ("dpo__aligned__beta", 0.4, ("dpo", "aligned", "beta")),
        ("dpo.aligned.beta", 0.4, ("dpo", "aligned", "beta")),
        ("dpo.aligned.training.learning_rate", 1e-4, ("dpo", "aligned", "training", "learning_rate")),
        ("dpo__aligned__lora__rank", 8, ("dpo", "aligned", "lora", "rank")),
        ("dpo.qwen2.5__x.beta", 0.4, ("dpo", "qwen2.5__x", "beta")),
        ("dpo.other", {"extends": "aligned"}, ("dpo", "other")),
        ("corpora__chat__sources__1__weight", 2, ("corpora", "chat", "sources", 1, "weight")),
        ("tracking__wandb__entity", "team", ("tracking", "wandb", "entity")),
    ],
)
def test_a_whole_name_sets_one_key(key, value, path):
    changed = apply_overrides(CONFIG | {key: value})
    assert key not in changed
    for part in path:
        changed = changed[part]
    assert changed == value
    # The config that was passed is as it was.
    assert apply_overrides(CONFIG) == CONFIG


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("dpo__algned__beta", "dpo__algned__beta: there is no 'algned' in dpo; did you mean 'aligned'?"),
        ("corpora.chat.sources.2.weight", "there is no '2' in corpora.chat.sources; known: 0, 1"),
        ("dpo.aligned.beta.x", "dpo.aligned.beta has no keys; expected a section"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(key, message):
    with pytest.raises(SnaketuneError) as refused:
        apply_overrides(CONFIG | {key: 1})
    assert message in str(refused.value)
