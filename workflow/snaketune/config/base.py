"""Base class and common types of the config models: immutable, typed, unknown keys refused."""

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

# Names become folder names and Snakemake wildcards, so they are restricted to characters that are safe in paths and shells.
# A snapshot of a run is called after it and the share of its steps: demo@0.5.
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]*(?:@0\.[0-9]+)?"
# Of jobs: the name of a reference pass begins with that of its model, which may be a snapshot.
JOB_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.@-]*"
Name = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$", max_length=80)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
# A commit, tag or branch on the Hub, by git's rules for names. It becomes part of paths in the Hub's cache.
Revision = Annotated[str, Field(pattern=r"^\w[\w.+@-]*(/\w[\w.+@-]*)*$", max_length=200)]
# A single line without control characters.
ShortText = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Model(BaseModel):
    """A config section: immutable, with unknown keys refused. Docstrings of its attributes become descriptions in the schema
    (docs/write_config.py)."""

    # A validator is built when it is first used, since a job uses few of the models that it imports.
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads yes, on and true as booleans, which pydantic would convert to 1.
        if not isinstance(value, bool):
            return value
        annotation = cls.model_fields[info.field_name].annotation
        allowed = (annotation, *get_args(annotation), *(one for kind in get_args(annotation) for one in get_args(kind)))
        # `in` would find the number 1 for true.
        if not any(kind is bool or kind is value for kind in allowed):
            raise ValueError(f"found {str(value).lower()}, which isn't a valid value for this key")
        return value
