"""The `verify:` section: how much of each finished training `snakemake verify` checks, and where it is shown."""

from snaketune.config.base import Model, PositiveInt


class Verify(Model):
    """Checks of finished trainings by `snakemake verify`, each of which computes something in another way and compares."""

    rows: PositiveInt = 8
    """Random packed rows, and stored results of an evaluation, that each check computes again; the same ones every time."""
    report: bool = False
    """Makes the checks and the replays (`snakemake replay`) for report and model cards too, which then show them."""
