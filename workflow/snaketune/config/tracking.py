"""The `tracking:` section: experiment trackers for the curves of trainings."""

import re
from importlib.util import find_spec
from typing import Any

from pydantic import ValidationInfo, field_validator, model_validator

from snaketune.config.base import Model, Name
from snaketune.config.secrets import TOKEN, nested

SECRET_NAME = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)
# Old keys of Weights & Biases; and the credentials before the host of a URL.
HEX_KEY = re.compile(r"[0-9a-f]{40}", re.IGNORECASE)
IN_ADDRESS = re.compile(r"//[^/@\s]*@")
PACKAGES = {"wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


class Wandb(Model):
    """Weights & Biases."""

    entity: str | None = None
    """Team or user. Default: that of the API key."""
    online: bool = False
    """Uploads during the training. Otherwise runs are stored in `results/wandb`, and `wandb sync` uploads them."""


class Mlflow(Model):
    """MLflow."""

    tracking_uri: str | None = None
    """Address of a server, or a database such as `sqlite:///mlflow.db`. Default: files in `results/mlruns`."""

    @field_validator("tracking_uri")
    @classmethod
    def _no_password(cls, uri: str | None) -> str | None:
        if uri and IN_ADDRESS.search(uri):
            raise ValueError(
                "contains a user or a password; put them into MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return uri


class Tracking(Model):
    """Trackers for the curves of trainings. Nothing is sent from this machine unless configured here; edits rerun nothing.

    Keys and tokens don't belong in a config: trackers read them from the environment or from their own login.
    """

    project: Name = "snaketune"
    """Name of the project (Weights & Biases, trackio) or experiment (MLflow)."""
    tensorboard: bool = True
    """Writes `tensorboard/` next to each result; `tensorboard --logdir results` shows all of them."""
    wandb: Wandb | None = None
    """Logs to Weights & Biases; `{}` for the defaults."""
    trackio: bool = False
    """Writes `results/trackio`; `TRACKIO_DIR=results/trackio trackio show` shows it."""
    mlflow: Mlflow | None = None
    """Logs to MLflow; `{}` for the defaults."""

    @model_validator(mode="before")
    @classmethod
    def _no_secrets(cls, data: Any) -> Any:
        # First, as messages of other checks would quote the secret, which these don't.
        for keys, value in nested(data):
            key = next((key for key in reversed(keys) if not key.isdecimal()), "")
            problem = f"unknown key {key}" if SECRET_NAME.search(key) else ""
            if not problem and isinstance(value, str) and (HEX_KEY.fullmatch(value) or TOKEN.search(value)):
                problem = f"the value of {key} looks like an API key" if key else "found what looks like an API key"
            if problem:
                raise ValueError(
                    f"{problem}; keys and tokens don't belong in a config. Put them into the environment (WANDB_API_KEY, "
                    "MLFLOW_TRACKING_TOKEN), or log in with the tracker's own command"
                )
        return data

    @field_validator("wandb", "trackio", "mlflow")
    @classmethod
    def _installed(cls, value: Any, info: ValidationInfo) -> Any:
        # Without torch, trainings run in another environment (`--sdm conda`), which can't be checked here.
        package = PACKAGES[str(info.field_name)]
        if value and not find_spec(package) and find_spec("torch"):
            raise ValueError(f"needs {package}, which isn't installed: pip install 'snaketune[tracking]'")
        return value
