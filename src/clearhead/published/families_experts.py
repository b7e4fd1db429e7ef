"""The families of published models as tables: experts."""

from clearhead.published.mapping import Family

FAMILIES: dict[str, Family] = {}
