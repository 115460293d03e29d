"""What all config models share: frozen, typed, and no key that nobody reads."""

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

# Names become folder names and wildcards, so they hold nothing that a shell or a path could take amiss.
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
Name = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$", max_length=80)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
# Of the Hub: a commit, tag or branch as git lets one be called. It becomes a part of paths in the Hub's cache.
Revision = Annotated[str, Field(pattern=r"^\w[\w.+@-]*(/\w[\w.+@-]*)*$", max_length=200)]
# A line that people read.
ShortText = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Model(BaseModel):
    """A config section: immutable, unknown keys refused, and documented so that the schema explains itself."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML reads yes, on and true alike, and pydantic would take them for 1.
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError(f"found {str(value).lower()}, which is no value for this key")
        return value
