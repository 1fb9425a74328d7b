"""The base of every settings class, and the field types they share.

A section is frozen, refuses keys it does not know, and converts nothing: `"4"` is not 4 and `1` is not
true. What YAML gives is what a setting gets.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # a value may be a secret; `wording.shown` knows which
    )


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_whole(value: Any) -> Any:
    """`server:` with nothing under it means the defaults of that section."""
    return {} if value is None else value


# A YAML list, kept as a tuple because settings are frozen.
from_list = BeforeValidator(_as_tuple)
from_null = BeforeValidator(_as_whole)

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
Text = Annotated[str, Field(min_length=1)]
