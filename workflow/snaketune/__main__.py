"""`python -m snaketune <stage> ...`: run one stage by hand, by the file of one of its jobs, as its rule does."""

from snaketune.interrupts import install

if __name__ == "__main__":
    install()

# isort: split
import argparse
import json
import os
import shlex
import signal
import sys
from pathlib import Path

from snaketune.cluster.job_endings import note_job_number
from snaketune.config.secrets import without_secrets
from snaketune.config.yaml_values import check_file
from snaketune.errors import SnaketuneError
from snaketune.stages.cache.accepted_code import accept
from snaketune.stages.cache.code_digest import code_digest
from snaketune.stages.cache.libraries import quiet_libraries
from snaketune.stages.cache.work_folders import WORK_ROOT
from snaketune.stages.host.disk_errors import disk_error_message
from snaketune.stages.job import result_at
from snaketune.stages.job_files import read_job_file
from snaketune.stages.run import run
from snaketune.stages.table import STAGES


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 with a plain message on standard error."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given)
    quiet_libraries()
    # A shell that waits for a training ignores it, and so would this.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if options.command != "preview":
        print("$ python -m snaketune", shlex.join(given), flush=True)
    try:
        if options.command == "preview":
            return _preview(options)
        if options.command == "clean":
            from snaketune.stages.cache.clean import clean

            clean(WORK_ROOT, remove=options.remove)
            return 0
        if options.command == "check":
            for file in options.files:
                check_file(file)
                print(f"{file} holds plain values alone")
            return 0
        if options.command == "accept":
            accept(lambda stage: code_digest(STAGES[stage].module) if stage in STAGES else None, WORK_ROOT.parent)
            return 0
        if options.command == "export-ref-logps":
            from snaketune.training.reference.export import export_ref_logps

            inputs = [result_at(path) for path in (options.ref_logps, options.pack, options.corpus)]
            written = export_ref_logps(*inputs, options.split, options.out)
            print(f"{written} pairs in {options.out}")
            return 0
        if options.command == "push":
            from snaketune.publishing.push import models_asked_for, push

            push(models_asked_for(options.names, options.configfile, options.models), dry_run=options.dry_run)
            return 0
        if options.command == "slurm-profile":
            from snaketune.cluster.describe import write_description

            print(write_description(options.out))
            return 0
        if options.command == "doctor":
            from snaketune.diagnostics import node_comparison

            if not options.nodes:
                print(json.dumps(node_comparison.measure_node(Path())))
                return 0
            found = node_comparison.measure_nodes(options.nodes)
            said = node_comparison.describe_outliers(found) or [
                f"no node is more than {node_comparison.TOLERANCE:.0%} from the median"
            ]
            print(node_comparison.table(found), "", *said, sep="\n")
            return 0
        job = read_job_file(options.job_file)
        if job.stage != options.command:
            raise SnaketuneError(f"{options.job_file} is of stage {job.stage}, not {options.command}")
        with note_job_number(Path(job.out)):
            run(job)
    except SnaketuneError as error:
        # Libraries repeat addresses, and these may hold a password.
        print(f"error: {without_secrets(str(error))}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Cut off by `| head`, say; what is left in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if not (told := disk_error_message(error)):
            raise
        print(f"error: {told}", file=sys.stderr)
        return 1
    return 0


def _preview(options: argparse.Namespace) -> int:
    """Print what there is to say of files, or of a config's sources; and write it as a page.

    Returns:
        The exit status: 1 where one can't be read, or holds no row that can be used.
    """
    from snaketune.preview.config_preview import look_at_config
    from snaketune.preview.rendered_rows import writer_of
    from snaketune.preview.source_preview import look_at_file
    from snaketune.preview.terminal import as_text, has_colours

    if bool(options.files) == bool(options.corpora):
        raise SnaketuneError("preview: name files to look at (for the sources of a config: snakemake preview)")
    if options.html and options.html.is_dir():
        raise SnaketuneError(f"--html: {options.html} is a folder; name a file in it")
    if options.corpora:
        looks = look_at_config(options.corpora)
    else:
        writer = writer_of(options.template, options.tokenizer)
        looks = (look_at_file(file, writer) for file in options.files)
    seen = []
    for look in looks:
        seen.append(look)
        for line in as_text(look, colour=has_colours(sys.stdout)):
            print(line.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding), flush=True)
    if options.html:
        from snaketune.report.preview_page import page

        options.html.parent.mkdir(parents=True, exist_ok=True)
        options.html.write_text(page(seen), encoding="utf-8")
        print(f"The same as a page: {options.html}", flush=True)
    # A rule that fails would lose its page.
    return 0 if options.corpora else int(any(look.trouble or not look.reading.used for look in seen))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m snaketune", description="Run one stage of the workflow by hand.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in STAGES:
        command = commands.add_parser(name, help=f"the {name} stage")
        command.add_argument("job_file", type=Path, metavar="JOB_FILE", help="such as results/.jobs/sft/demo.json")
    preview = commands.add_parser("preview", help="what files hold, as the model would see it, and lines for a config")
    preview.add_argument("files", nargs="*", metavar="FILE", help="data, in any format and layout")
    preview.add_argument(
        "--template", type=Path, metavar="FILE", help="a chat template (default: the tokenizer's own, or ChatML)"
    )
    preview.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="with tokenizer.json; counts tokens exactly (default: estimated)",
    )
    preview.add_argument("--html", type=Path, metavar="FILE", help="write the same as a page")
    # By the rule, in the place of files.
    preview.add_argument("--corpora", help=argparse.SUPPRESS)
    clean = commands.add_parser("clean", help="old work: say what removing it frees, or remove it")
    clean.add_argument("--remove", action="store_true", help="remove it; without this, only tell")
    export = commands.add_parser(
        "export-ref-logps", help="pairs with their reference log-probabilities, for TRL's DPOTrainer"
    )
    for name, what in (
        ("ref-logps", "of the log-probabilities"),
        ("pack", "of the pairs"),
        ("corpus", "that they are from"),
    ):
        export.add_argument(f"--{name}", required=True, type=Path, metavar="MANIFEST", help=what)
    export.add_argument("--split", choices=("train", "held_out"), default="train", help="(default: train)")
    export.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="a file that ends in .parquet or .jsonl"
    )
    push = commands.add_parser("push", help="models to the Hub, as `push:` in a config says")
    push.add_argument("names", nargs="*", metavar="NAME", help="entries of `push:` (default: all)")
    push.add_argument("--dry-run", action="store_true", help="list files, sizes and digests, and send nothing")
    push.add_argument(
        "--configfile", type=Path, default=Path("config/config.yaml"), metavar="FILE", help="(default: %(default)s)"
    )
    push.add_argument("--models", metavar="JSON", help="what `push:` says, as the rule does, in the place of a config")
    described = commands.add_parser("slurm-profile", help="ask SLURM what it gives, and write it down for the profile")
    described.add_argument(
        "--out", type=Path, default=Path("profiles/slurm/cluster.yaml"), help="(default: %(default)s)", metavar="FILE"
    )
    check = commands.add_parser(
        "check", help="config files: whether they hold plain values alone; nothing in them is run"
    )
    check.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON or YAML")
    doctor = commands.add_parser("doctor", help="what this node does, or which of a cluster's nodes are slow")
    doctor.add_argument("--nodes", type=int, default=0, metavar="N", help="of SLURM, instead of this one")
    commands.add_parser("accept", help="changes of code: let all results count as made with the code of now")
    return parser


if __name__ == "__main__":
    sys.exit(main())
