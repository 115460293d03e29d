"""`tracking:`, where the curves of trainings are drawn."""

import re
from importlib.util import find_spec
from typing import Any

from pydantic import ValidationInfo, field_validator, model_validator

from snaketune.config.base import Model, Name
from snaketune.config.secrets import TOKEN

SECRET_NAME = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)
# Weights & Biases' keys and Hugging Face's tokens; and what stands before an address' host.
SECRET_VALUE = re.compile(r"[0-9a-f]{40}|wandb_v\d_\w+|hf_\w{20,}", re.IGNORECASE)
IN_ADDRESS = re.compile(r"//[^/@\s]*@")
PACKAGES = {"wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


class Wandb(Model):
    """Weights & Biases."""

    entity: str | None = None
    """Team or user; default: that of the API key."""
    online: bool = False
    """Sends while it trains; otherwise runs lie in `results/wandb`, and `wandb sync` sends them."""


class Mlflow(Model):
    """MLflow."""

    tracking_uri: str | None = None
    """A server, or a database such as `sqlite:///mlflow.db`; default: files in `results/mlruns`."""

    @field_validator("tracking_uri")
    @classmethod
    def _no_password(cls, uri: str | None) -> str | None:
        if uri and IN_ADDRESS.search(uri):
            raise ValueError(
                "names a user or a password; put them into MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return uri


class Tracking(Model):
    """Where the curves of trainings go. Nothing leaves this machine unless it is asked for here; editing this reruns nothing.

    Keys and tokens are no part of a config: each tracker finds them in the environment, or where it keeps them itself.
    """

    project: Name = "snaketune"
    """What Weights & Biases and trackio call a project, and MLflow an experiment."""
    tensorboard: bool = True
    """Writes `tensorboard/` beside each result; look at all of them with `tensorboard --logdir results`."""
    wandb: Wandb | None = None
    """Weights & Biases; `{}` for what it does by default."""
    trackio: bool = False
    """Writes `results/trackio`; look at it with `TRACKIO_DIR=results/trackio trackio show`."""
    mlflow: Mlflow | None = None
    """MLflow; `{}` for what it does by default."""

    @model_validator(mode="before")
    @classmethod
    def _no_secrets(cls, given: Any) -> Any:
        # Before anything else, whose messages would quote them.
        if found := _secret(given):
            raise ValueError(
                f"{found}; keys and tokens are no part of a config. Put them into the environment (WANDB_API_KEY, "
                "MLFLOW_TRACKING_TOKEN), or log in with the tracker's own command"
            )
        return given

    @field_validator("wandb", "trackio", "mlflow")
    @classmethod
    def _installed(cls, value: Any, info: ValidationInfo) -> Any:
        # Where torch isn't there either, trainings run in another environment (`--sdm conda`).
        package = PACKAGES[info.field_name]
        if value and not find_spec(package) and find_spec("torch"):
            raise ValueError(f"needs {package}, which isn't installed: pip install 'snaketune[tracking]'")
        return value


def _secret(given: Any, key: str = "") -> str | None:
    """What in a config looks like a secret, without saying it."""
    if isinstance(given, str) and (SECRET_VALUE.fullmatch(given) or TOKEN.search(given)):
        return f"the value of {key} looks like an API key" if key else "found what looks like an API key"
    if isinstance(given, list):
        return next((found for item in given if (found := _secret(item, key))), None)
    if not isinstance(given, dict):
        return None
    for name, value in given.items():
        if SECRET_NAME.search(str(name)):
            return f"unknown key {name}"
        if found := _secret(value, str(name)):
            return found
    return None
