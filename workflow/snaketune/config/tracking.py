"""The `tracking:` section: experiment trackers for the curves of trainings."""

import re
from importlib.util import find_spec
from typing import Any

from pydantic import ValidationInfo, field_validator, model_validator

from snaketune.config.base import Model, Name
from snaketune.config.secrets import TOKEN

SECRET_NAME = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)
# Keys of Weights & Biases, tokens of Hugging Face; and the credentials before the host of a URL.
SECRET_VALUE = re.compile(r"[0-9a-f]{40}|wandb_v\d_\w+|hf_\w{20,}", re.IGNORECASE)
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
    def _no_secrets(cls, given: Any) -> Any:
        # First, as messages of other checks would quote the secret.
        if problem := _secret(given):
            raise ValueError(
                f"{problem}; keys and tokens don't belong in a config. Put them into the environment (WANDB_API_KEY, "
                "MLFLOW_TRACKING_TOKEN), or log in with the tracker's own command"
            )
        return given

    @field_validator("wandb", "trackio", "mlflow")
    @classmethod
    def _installed(cls, value: Any, info: ValidationInfo) -> Any:
        # Without torch, trainings run in another environment (`--sdm conda`), which can't be checked here.
        package = PACKAGES[info.field_name]
        if value and not find_spec(package) and find_spec("torch"):
            raise ValueError(f"needs {package}, which isn't installed: pip install 'snaketune[tracking]'")
        return value


def _secret(given: Any, key: str = "") -> str | None:
    """Describe what looks like a secret, without quoting it; None if nothing does."""
    if isinstance(given, str) and (SECRET_VALUE.fullmatch(given) or TOKEN.search(given)):
        return f"the value of {key} looks like an API key" if key else "found what looks like an API key"
    if isinstance(given, list):
        return next((problem for item in given if (problem := _secret(item, key))), None)
    if not isinstance(given, dict):
        return None
    for name, value in given.items():
        if SECRET_NAME.search(str(name)):
            return f"unknown key {name}"
        if problem := _secret(value, str(name)):
            return problem
    return None
