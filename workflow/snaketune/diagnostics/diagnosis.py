"""The `diagnosis` stage: how much of a speed-up each change explains, by interleaved trials (`diagnostics.attribution`)."""

from snaketune.artifacts.manifest import Artifact
from snaketune.stages.cache import libraries
from snaketune.stages.cache.work_folders import WorkFolder
from snaketune.stages.declaration import Stage, any_number
from snaketune.stages.outcome import Outcome
from snaketune.stages.specs import DiagnosisSpec

STAGE = Stage(
    module=__name__,
    spec=DiagnosisSpec,
    payload="attribution",
    inputs={"trials": any_number("trial")},
    libraries=libraries.always("matplotlib"),
)


def build(spec: DiagnosisSpec, work: WorkFolder, *, trials: list[Artifact]) -> Outcome:
    """Fill `work.payload` with the attribution as JSON, tables and a figure; see `write_attribution`."""
    from snaketune.diagnostics.attribution import write_attribution

    return write_attribution(spec, work, trials=trials)
