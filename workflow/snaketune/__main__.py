"""`python -m snaketune <command> ...`: run one stage from a job file, as its rule does, or one of the other commands."""

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
from snaketune.stages.cache.code_digest import accept, code_digest
from snaketune.stages.cache.libraries import quiet_libraries
from snaketune.stages.cache.work_folders import WORK_ROOT
from snaketune.stages.host.disk_errors import disk_error_message
from snaketune.stages.job import result_at
from snaketune.stages.loaded_job import read_job
from snaketune.stages.run import run
from snaketune.stages.table import STAGES


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the exit status: 0, or 1 after an error message on standard error."""
    words = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(words)
    quiet_libraries()
    # A shell that waits for a training ignores SIGTERM, and child processes would inherit that.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        return _run_command(options)
    except SnaketuneError as error:
        # Libraries repeat URLs in their messages, which may hold a password.
        print(f"error: {without_secrets(str(error))}", file=sys.stderr)
        if options.command in STAGES:
            print(f"to run this job by hand: python -m snaketune {shlex.join(words)}", file=sys.stderr)
    except BrokenPipeError:
        # The output was cut off, by `| head` for example; the rest of the buffer is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if not (message := disk_error_message(error)):
            raise
        print(f"error: {message}", file=sys.stderr)
    return 1


def _run_command(options: argparse.Namespace) -> int:
    match options.command:
        case "preview":
            return _preview(options)
        case "init":
            from snaketune.preview.first_config import first_config

            if options.out.exists():
                raise SnaketuneError(f"{options.out} exists; name another file with --out")
            options.out.write_text(first_config(options.files, options.base), encoding="utf-8")
            print(
                f"{options.out} is written. Look at it, then: snakemake -n --configfile {shlex.quote(str(options.out))}"
            )
        case "smoke":
            from snaketune.diagnostics.smoke import check_smoke_run, write_smoke_run

            if options.config is None:
                check_smoke_run(options.folder)
            else:
                write_smoke_run(options.config, options.folder)
        case "clean":
            from snaketune.stages.cache.clean import clean

            named: list[Path] = []
            if options.config:
                from snaketune.config.load import load
                from snaketune.stages.graph import JobGraph

                jobs = JobGraph(*load(json.loads(options.config))).jobs.values()
                named = [Path(job.manifest) for job in jobs]
            clean(WORK_ROOT, remove=options.remove, named=set(named))
        case "check":
            for file in options.files:
                check_file(file)
                print(f"{file} holds plain values only")
        case "accept":
            accept(lambda stage: code_digest(STAGES[stage].module) if stage in STAGES else None, WORK_ROOT.parent)
        case "export-ref-logps":
            from snaketune.publishing.export_ref_logps import export_ref_logps

            ref_logps, pack, corpus = (result_at(path) for path in (options.ref_logps, options.pack, options.corpus))
            written = export_ref_logps(ref_logps, pack, corpus, options.split, options.out)
            print(f"{written} pairs in {options.out}")
        case "push":
            from snaketune.publishing.push import push, requested_models

            if options.models is None:
                # As a rule does, for messages that name whole commands.
                os.environ["SNAKETUNE_CONFIG"] = shlex.quote(str(options.configfile))
            push(requested_models(options.names, options.configfile, options.models), dry_run=options.dry_run)
        case "verify":
            from snaketune.diagnostics.verify_command import print_verified

            return print_verified(options.manifests)
        case "replay":
            from snaketune.diagnostics.replay_command import replay

            return max(replay(manifest, options.steps) for manifest in options.manifests)
        case "doctor":
            from snaketune.diagnostics import node_comparison

            if not options.nodes:
                print(json.dumps(node_comparison.measure_node(Path())))
                return 0
            nodes = node_comparison.measure_nodes(options.nodes)
            none = f"no node is more than {node_comparison.TOLERANCE:.0%} from the median"
            print(node_comparison.table(nodes), "", *(node_comparison.describe_outliers(nodes) or [none]), sep="\n")
        case stage:
            job = read_job(options.job_file)
            if job.stage.name != stage:
                raise SnaketuneError(
                    f"{options.job_file} is a job file of stage {job.stage.name}; run `python -m snaketune {job.stage.name}` "
                    "with it"
                )
            with note_job_number(job.out):
                run(job)
    return 0


def _preview(options: argparse.Namespace) -> int:
    """Print a preview of files, or of a config's sources, and write it as an HTML page if requested.

    Returns:
        The exit status: 1 if a file can't be read or has no usable row.
    """
    from snaketune.preview.rendered_rows import load_renderer
    from snaketune.preview.source_preview import preview_config, preview_file
    from snaketune.preview.terminal import as_text, facts, file_lines, has_colours

    if bool(options.files) == bool(options.corpora):
        raise SnaketuneError("preview: name files to preview (for the sources of a config: snakemake preview)")
    if options.html and options.html.is_dir():
        raise SnaketuneError(f"--html: {options.html} is a folder; name a file in it")
    if options.corpora:
        previews = preview_config(options.corpora)
    else:
        writer = load_renderer(options.template, options.tokenizer)
        previews = (preview_file(file, writer) for file in options.files)
    seen = []
    for preview in previews:
        seen.append(preview)
        coloured = has_colours(sys.stdout)
        for line in as_text(preview, colour=coloured):
            # Its colours are escape sequences, and the rest is escaped already.
            print(line, file=sys.__stdout__ if coloured else sys.stdout, flush=True)
    if options.html:
        from snaketune.report.html import render

        options.html.parent.mkdir(parents=True, exist_ok=True)
        page = render("preview", previews=seen, facts=facts, file_lines=file_lines)
        options.html.write_text(page, encoding="utf-8")
        print(f"The same as a page: {options.html}", flush=True)
    # A rule that fails would lose its page.
    return 0 if options.corpora else int(any(preview.trouble or not preview.reading.used for preview in seen))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m snaketune", description="Run one stage of the workflow.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in STAGES:
        command = commands.add_parser(name, help=f"the {name} stage")
        command.add_argument("job_file", type=Path, metavar="JOB_FILE", help="such as results/.jobs/sft/demo.json")
    preview = commands.add_parser(
        "preview", help="show files as the model would see them, and suggest lines for a config"
    )
    preview.add_argument("files", nargs="*", metavar="FILE", help="data, in any format and layout")
    preview.add_argument(
        "--template", type=Path, metavar="FILE", help="a chat template (default: the tokenizer's own, or ChatML)"
    )
    exactly = "a folder with tokenizer.json, to count tokens exactly (default: estimated)"
    preview.add_argument("--tokenizer", type=Path, metavar="FOLDER", help=exactly)
    preview.add_argument("--html", type=Path, metavar="FILE", help="also write the preview as a page")
    # Used by the rule instead of files.
    preview.add_argument("--corpora", help=argparse.SUPPRESS)
    first = commands.add_parser("init", help="write a complete config for files and a base model, with reasons")
    first.add_argument("files", nargs="+", metavar="FILE", help="data, in any format and layout")
    first.add_argument("--base", required=True, metavar="MODEL", help="a folder, or a model of the Hub: owner/name")
    first.add_argument("--out", type=Path, default=Path("mine.yaml"), metavar="FILE", help="(default: %(default)s)")
    smoke = commands.add_parser("smoke", help="used by `snakemake smoke`: write a smoke run, or say what it has shown")
    smoke.add_argument("folder", type=Path, metavar="FOLDER", help="of the smoke run")
    smoke.add_argument("--config", metavar="JSON", help="the whole config, to write the run")
    clean = commands.add_parser("clean", help="list old work folders and what removing them frees, or remove them")
    clean.add_argument("--remove", action="store_true", help="remove them; without this, only list them")
    clean.add_argument(
        "--config", metavar="JSON", help="the whole config: also list published results that it doesn't name"
    )
    export = commands.add_parser(
        "export-ref-logps", help="pairs with their reference log-probabilities, for TRL's DPOTrainer"
    )
    for name, what in (("ref-logps", "log-probabilities"), ("pack", "pairs"), ("corpus", "corpus of the pairs")):
        export.add_argument(f"--{name}", required=True, type=Path, metavar="MANIFEST", help=f"of the {what}")
    export.add_argument("--split", choices=("train", "held_out"), default="train", help="(default: train)")
    export.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="a file name that ends in .parquet or .jsonl"
    )
    push = commands.add_parser("push", help="upload models to the Hub, as configured under `push:`")
    push.add_argument("names", nargs="*", metavar="NAME", help="entries of `push:` (default: all)")
    push.add_argument("--dry-run", action="store_true", help="list files, sizes and digests; upload nothing")
    push.add_argument(
        "--configfile", type=Path, default=Path("config/config.yaml"), metavar="FILE", help="(default: %(default)s)"
    )
    push.add_argument("--models", metavar="JSON", help="the content of `push:`, given by the rule instead of a config")
    check = commands.add_parser("check", help="check that config files hold plain values only; nothing in them is run")
    check.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON or YAML")
    doctor = commands.add_parser("doctor", help="measure this node, or find the slow ones of a cluster's nodes")
    doctor.add_argument(
        "--nodes", type=int, default=0, metavar="N", help="measure N nodes of SLURM instead of this one"
    )
    verify = commands.add_parser("verify", help="print the checks of finished trainings; exit status 1 if one failed")
    verify.add_argument(
        "manifests",
        nargs="+",
        type=Path,
        metavar="MANIFEST",
        help="such as results/verification/sft-demo/manifest.json",
    )
    replay = commands.add_parser(
        "replay", help="repeat the first steps of finished trainings, and compare with their record"
    )
    replay.add_argument(
        "manifests", nargs="+", type=Path, metavar="MANIFEST", help="such as results/sft/demo/manifest.json"
    )
    replay.add_argument("--steps", type=int, default=20, metavar="N", help="at least so many (default: %(default)s)")
    commands.add_parser("accept", help="accept code changes: all results count as made with the current code")
    return parser


if __name__ == "__main__":
    sys.exit(main())
