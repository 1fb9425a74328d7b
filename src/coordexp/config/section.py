"""The base class of all settings classes, and the field types that they share.

A section is frozen, refuses unknown keys and converts no values: `"4"` is not accepted for 4, nor `1` for true.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class SettingsSection(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # A value may be a secret. `wording.quote_value` knows which.
    )


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _null_to_defaults(value: Any) -> Any:
    """Read `server:` with nothing under it as the defaults of that section."""
    return {} if value is None else value


from_list = BeforeValidator(_list_to_tuple)  # Settings are frozen, so a YAML list becomes a tuple.
from_null = BeforeValidator(_null_to_defaults)

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
Text = Annotated[str, Field(min_length=1)]
