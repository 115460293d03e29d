"""MLflow through its client: a server, a database, or by default files below `results/mlruns`.

Files are the default because many jobs of a cluster can write them concurrently; MLflow must be allowed to use them
(`MLFLOW_ALLOW_FILE_STORE`). A kill between two files leaves a point in some curves and not in others, so the newest step is
queried for each curve.
"""

import os
import time
from collections import defaultdict

from snaketune.stages.host.locks import locked
from snaketune.tracking.curves import TrackedRun

FINGERPRINT = "snaketune.fingerprint"
# Retry for seconds, instead of MLflow's default of minutes, during which the training would wait.
RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


class Run:
    """One training in MLflow, identified by a tag with its fingerprint."""

    def __init__(self, tracked: TrackedRun):
        # MLflow reads these at import.
        os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
        for name, value in RETRIES.items():
            os.environ.setdefault(name, value)
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        project, fingerprint = tracked.settings.project, tracked.fingerprint
        uri = tracked.settings.mlflow.tracking_uri or (tracked.results / "mlruns").absolute().as_uri()
        self.client, self.metric = MlflowClient(tracking_uri=uri, registry_uri=uri), Metric
        # Locked, so that trainings that start together create only one experiment.
        with locked(tracked.results / ".mlflow.lock", "another training to make MLflow's experiment"):
            experiment = self.client.get_experiment_by_name(project)
            experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(project)
        known = self.client.search_runs([experiment_id], f"tags.`{FINGERPRINT}` = '{fingerprint}'", max_results=1)
        self.newest: dict[str, int] = defaultdict(lambda: -1)
        if known:
            self.id, logged = known[0].info.run_id, known[0].data.params
            self.client.update_run(self.id, status="RUNNING")
            for curve in known[0].data.metrics:
                points = self.client.get_metric_history(self.id, curve)
                self.newest[curve] = max((point.step for point in points), default=-1)
        else:
            tags = {FINGERPRINT: fingerprint, "snaketune.stage": tracked.stage}
            self.id, logged = self.client.create_run(experiment_id, run_name=tracked.name, tags=tags).info.run_id, {}
        # The client divides both into requests of the size that servers accept.
        new = [Param(name, str(value)) for name, value in tracked.parameters.items() if name not in logged]
        self.client.log_batch(self.id, params=new)

    def write(self, points: list[tuple[int, dict[str, float]]]) -> None:
        now = int(time.time() * 1000)
        metrics = [self.metric(curve, value, now, step) for step, values in points for curve, value in values.items()]
        self.client.log_batch(self.id, metrics=metrics)

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if finished else "FAILED")
