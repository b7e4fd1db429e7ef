"""The families of published models as tables: encoders."""

from clearhead.published.mapping import Family

FAMILIES: dict[str, Family] = {}
