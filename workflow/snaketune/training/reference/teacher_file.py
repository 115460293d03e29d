"""Reading a teacher's tokens for the rows of a pack (`training.reference.teacher_rows` writes them)."""

from snaketune.artifacts.manifest import Artifact, rebuild_command
from snaketune.engine.distillation import TeacherRows
from snaketune.engine.packing.rows import PackedRows
from snaketune.errors import SnaketuneError
from snaketune.tables import read_table


def open_teacher(teacher: Artifact, pack: Artifact, split: str, rows: PackedRows, temperature: float) -> TeacherRows:
    """The teacher's tokens for the rows of a split. SnaketuneError: they are of other rows, or at another temperature."""
    manifest = teacher.provenance
    found, expected = manifest["inputs"]["pack"], [pack.content]
    opened = TeacherRows(read_table(teacher.file(f"{split}.arrow")).to_batches(), manifest["k"])
    if found != expected or len(opened) != len(rows) or manifest["temperature"] != temperature:
        raise SnaketuneError(
            f"{teacher.manifest_path} isn't of the rows of {pack.manifest_path} at temperature {temperature}; "
            f"rebuild it with: {rebuild_command(teacher.manifest_path)}"
        )
    return opened
