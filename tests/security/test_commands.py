"""Free text that reaches a shell: names of files, settings, paths of configs. Real rules get it, and nothing of it runs."""

import copy
import json
import shlex
import shutil
from pathlib import Path

import pytest

from snaketune.config.load import load
from snaketune.config.operation import Operation
from snaketune.config.task_files import task_files
from snaketune.errors import SnaketuneError
from snaketune.stages.graph import JobGraph
from snaketune.stages.host.launch_command import command
from tests.workflow.command_line import snakemake
from tests.workflow.conftest import MICRO, ROOT, Project

# To a shell each of these is a command, to Snakemake a name to fill in, to a program an option.
TOUCHES = (
    "$(touch HACKED)",
    "`touch HACKED`",
    "'; touch HACKED; '",
    '"; touch HACKED; "',
    "&& touch HACKED #",
    "| touch HACKED",
)
SAYS = " ".join(
    (*TOUCHES, "{input}", "{params.code}", "{{1}}", "{", "}", "%s", "\\", "!x", "*", "~", "-rf", "\n", "\t", "é")
)
# A file's name holds no slash, and Snakemake takes none with braces.
NAME = f"- {' '.join(TOUCHES)} * ? [a] ~ \\ %s é.jsonl"


@pytest.fixture
def hostile(fresh, mark) -> Project:
    """The data stages of the micro project, with text of strangers wherever text can be."""
    folder = fresh.folder
    shutil.move(folder / "data/chat.jsonl", folder / "data" / NAME)
    shutil.copy(folder / "data/chatml.jinja", folder / "data" / NAME.replace("jsonl", "jinja"))
    config = copy.deepcopy(MICRO)
    for section in ("dpo", "eval", "sft"):
        del config[section]
    del config["corpora"]["pairs"]
    config["corpora"]["chat"] |= {
        "sources": [{"files": [f"data/{NAME}"], "speakers": {SAYS: "user"}}],
        "cleaning": {"drop_matching": [r"\$\(touch HACKED\)"]},
        "max_quarantined_fraction": 1,
    }
    config["tokenizers"]["small"]["train"]["corpora"] = ["chat"]
    config["tokenizers"]["small"]["chat_template"] = f"data/{NAME.replace('jsonl', 'jinja')}"
    config["report"] = {"title": SAYS, "note": SAYS}
    config["tracking"] = {"wandb": {"entity": SAYS}, "mlflow": {"tracking_uri": SAYS}}
    fresh.config = config
    return fresh


def marks(folder: Path) -> list[Path]:
    return list(folder.rglob("HACKED*"))


def test_names_of_files_and_texts_of_a_config_are_words_to_the_shell(hostile, mark):
    """Corpus, tokenizer and report, run by Snakemake, and the config's own name too."""
    hostile.write_config()
    config = f"{' '.join(TOUCHES)}.yaml"
    shutil.move(hostile.folder / "config.yaml", hostile.folder / config)
    arguments = ["--snakefile", str(ROOT / "Snakefile"), "--configfile", config, "--cores", "1", "--printshellcmds"]
    status, said = snakemake(arguments, hostile.folder)
    assert status == 0, said[-3000:]
    assert (hostile.folder / "results/tokenizer/small/manifest.json").is_file()
    assert "touch HACKED" in hostile.read("results/report/pages/index.html")
    assert not marks(hostile.folder)


def test_no_text_of_a_config_is_in_a_command(fresh, mark):
    """Commands name job files, which hold it."""
    fresh.config["tracking"] = {"wandb": {"entity": SAYS}, "mlflow": {"tracking_uri": SAYS}}
    fresh.config["report"] = {"title": SAYS}
    said = fresh.snakemake("-n", "--printshellcmds")
    commands = [line.strip() for line in said.splitlines() if "python -m snaketune" in line]
    (training,) = (command for command in commands if "snaketune sft" in command)
    assert training.endswith(
        "python -m snaketune sft results/.jobs/sft/run.json 2>&1 | (trap '' INT HUP; tee results/logs/sft/run.log)"
    )
    assert not [command for command in commands if "HACKED" in command]
    assert json.loads(fresh.read("results/.jobs/sft/run.json"))["tracking"]["wandb"]["entity"] == SAYS
    # This one is sent nowhere and doesn't know the variable.
    assert "tracking" not in json.loads(fresh.read("results/.jobs/corpus/chat.json"))
    assert not marks(fresh.folder)


def test_names_that_snakemake_cannot_take_are_refused(tmp_path, monkeypatch):
    """Given ones, and those that are found: in a model's folder, and among the files of tasks."""
    monkeypatch.chdir(tmp_path)
    config = {
        "corpora": {"c": {"kind": "text", "sources": [{"files": ["data.txt"]}]}},
        "tokenizers": {"t": {"adopt": "./base"}},
    }
    for name in ("a{input}.json", "a\nb.json", "{{a}}.json", "{params.code}.json", "a\x1b[31m.json"):
        for folder in ("base", "tasks"):
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir()
            Path(folder, name).write_text("{}")
        Path("data.txt").write_text("x")
        Path(name).write_text("x")
        reason = "contains braces or control characters, which Snakemake can't handle; rename it"
        with pytest.raises(SnaketuneError, match=reason):
            JobGraph(*load(config))
        with pytest.raises(SnaketuneError, match=reason):
            load({"corpora": {"c": {"kind": "text", "sources": [{"files": [name]}]}}})
        with pytest.raises(SnaketuneError, match=reason):
            task_files("tasks")


def test_names_of_globbed_files_are_quoted_too(fresh, mark):
    """Names of files in a model's folder, which the config doesn't contain."""
    base = fresh.folder / "base"
    base.mkdir()
    result = [*(f"{one}.json" for one in TOUCHES), "-x.json", "--help.json", "a b.json"]
    for file in ("config.json", "model.safetensors", "tokenizer.json", *result):
        (base / file).write_text("{}")
    for section in ("dpo", "eval", "sft"):
        del fresh.config[section]
    fresh.config["tokenizers"]["small"] = {"adopt": "base"}
    said = fresh.snakemake("results/tokenizer/small/manifest.json", check=False)
    # It got there, with all of them.
    assert "can't be loaded as a tokenizer" in said
    assert not marks(fresh.folder)


def test_a_name_that_looks_like_an_option_is_made_a_path(fresh):
    """Relative to the config's folder, without a prefix."""
    (fresh.folder / "--help").write_text("{}\n")
    fresh.config["corpora"]["chat"]["sources"] = [{"files": [f"{fresh.folder}/--help"]}]
    fresh.snakemake("-n", "results/corpus/chat/manifest.json")
    assert json.loads(fresh.read("results/.jobs/corpus/chat.json"))["inputs"]["files"] == ["./--help"]


def test_a_training_in_several_processes_is_started_with_words(tmp_path):
    """On several nodes the command goes through a shell on each of them."""
    state = tmp_path / f"{TOUCHES[0]} {TOUCHES[2]}"
    for nodes in (1, 2):
        words = command(Operation(gpus=0, nodes=nodes), state / "job.json", state)
        assert any(str(state / "job.json") in word or TOUCHES[0] in word for word in words)
    # Parsed like the shell of a node does.
    assert shlex.split(words[-1])[-2:] == [str(state / "job.json"), str(state)]
