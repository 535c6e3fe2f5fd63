"""The options that a user has given: each is read by the declared table, and everything wrong is collected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pg_cdc_source.errors import OptionError
from pg_cdc_source.options.conninfo import ConnectionOptions, Url, check_settings
from pg_cdc_source.options.declared import OPTIONS, Group
from pg_cdc_source.options.habits import HABITS
from pg_cdc_source.options.libpq_keywords import LIBPQ_KEYWORDS, ONLY_IN_URL, OWN_KEYWORDS, PASSED_KEYWORDS
from pg_cdc_source.options.names import check_characters
from pg_cdc_source.options.spark_jdbc import as_written, is_taken
from pg_cdc_source.options.suggestions import nearest


@dataclass(frozen=True, slots=True)
class Given:
    """The options after reading.

    ``values`` has every option of the groups, with its default if it was not given; ``names`` has those that were
    given; ``libpq`` has the keywords that pass through; ``taken`` those of Spark's JDBC source, in lower case,
    that have no effect.
    """

    values: dict[str, Any]
    names: set[str]
    libpq: dict[str, str]
    problems: list[OptionError]
    taken: list[str]

    def connection(self) -> ConnectionOptions:
        """Combine ``url`` with the other options of the connection; adds contradictions to ``problems``."""
        url: Url = self.values["url"] or Url("", {})
        settings = dict(self.libpq)
        for name in ("host", "port", "database", "user", "password"):
            if self.values[name] is not None:
                settings["dbname" if name == "database" else name] = self.values[name]
        if "database" in self.names and "dbname" in self.libpq:
            self.problems.append(OptionError("database and dbname are the same", remedy="remove one of them"))
        for keyword in sorted(settings.keys() & url.settings.keys()):
            name = "database" if keyword == "dbname" and "database" in self.names else keyword
            self.problems.append(
                OptionError(f"both url and the option {name} say {keyword}", remedy="remove one of them")
            )
        try:
            check_settings(settings)
        except OptionError as error:
            self.problems.append(error)
        command, provider = self.values["passwordCommand"], self.values["passwordProvider"]
        said = [name for name in ("password", "passfile") if name in settings or name in url.settings]
        asked = [name for name in ("passwordCommand", "passwordProvider") if self.values[name] is not None]
        if asked and len([*said, *asked]) > 1:
            ways = " and ".join([*said, *asked])
            self.problems.append(
                OptionError(f"{ways} each say where the password comes from", remedy="keep one of them")
            )
        if not url.conninfo:
            settings = {**url.settings, **settings}
        return ConnectionOptions(url.conninfo, tuple(sorted(settings.items())), command, provider)

    def raise_problems(self) -> None:
        """Raise one OptionError for all problems, if there are any."""
        if len(self.problems) == 1:
            raise self.problems[0]
        if self.problems:
            raise OptionError(f"{len(self.problems)} things are wrong with the options", problems=self.problems)


def read_given(options: Mapping[str, str], groups: tuple[Group, ...]) -> Given:
    """Read every option of ``groups`` on its own; the caller checks how they fit together."""
    _refuse_create_table(options, groups)
    rows = {option.name.lower(): option for option in OPTIONS if option.group in groups}
    defaults = {row.name: None if row.default is None else row.parse(row.default) for row in rows.values()}
    given = Given(defaults, set(), {}, [], [])
    texts: dict[str, str] = {}
    for key, text in options.items():
        # Spark hands over lower-case keys; a caller in Python may write both.
        if key.lower() in texts:
            given.problems.append(
                OptionError(
                    f"the option {key} is given twice",
                    remedy="remove one of them: upper and lower case make no difference in an option's name",
                )
            )
        texts[key.lower()] = text
    for key, text in texts.items():
        option = rows.get(key)
        if option is not None:
            given.names.add(option.name)
        try:
            check_characters(text)
            if option is not None:
                given.values[option.name] = option.parse(text)
            elif key in PASSED_KEYWORDS:
                given.libpq[key] = text
            elif "pgsnapshot" in groups and is_taken(key, text):
                given.taken.append(key)
            else:
                given.problems.append(_unknown_option(key, groups))
        except OptionError as error:
            name = option.name if option else as_written(key)
            given.problems.append(OptionError(f"option {name}: {error.what}", remedy=error.remedy))
    return given


def _refuse_create_table(options: Mapping[str, str], groups: tuple[Group, ...]) -> None:
    """Raise OptionError where Spark asks for the schema of a table that it is about to keep in its catalog.

    Only then it gives the table's properties besides the options, ``provider`` and ``owner`` among them. When the
    table is read it gives nothing at all.
    """
    if {"provider", "owner"} <= {key.lower() for key in options}:
        raise OptionError(
            "CREATE TABLE … USING cannot work: Spark gives a Python data source none of the table's options when the "
            "table is read",
            remedy="use CREATE TEMPORARY VIEW … USING pgsnapshot OPTIONS (…)"
            if "pgsnapshot" in groups
            else 'use spark.readStream.format("pgcdc")',
        )


# By group, in lower case: the name as it is written, and the remedy.
_HABITS = {group: {name.lower(): (name, remedy) for name, remedy in habits.items()} for group, habits in HABITS.items()}


def _unknown_option(key: str, groups: tuple[Group, ...]) -> OptionError:
    # Spark hands over lower-case keys, so a name that is not known cannot be shown as the user has written it.
    if key in OWN_KEYWORDS:
        return OptionError(f"the option {key} cannot be set", remedy=f"remove it: {OWN_KEYWORDS[key]}")
    if key in ONLY_IN_URL:
        return OptionError(
            f"the option {key} cannot be set", remedy="put it into url, which Spark redacts in its plans"
        )
    for group in groups:
        if key in _HABITS[group]:
            name, remedy = _HABITS[group][key]
            return OptionError(f"the option {name} is not known here", remedy=remedy)
    formats = {option.group: option.name for option in OPTIONS if option.name.lower() == key}
    for name in formats.values():
        return OptionError(
            f"the option {name} is not known here", remedy=f"remove it: it belongs to {' and '.join(formats)}"
        )
    names = [option.name for option in OPTIONS if option.group in groups]
    near = nearest(key, PASSED_KEYWORDS.union(names))
    remedy = f"did you mean {near}?" if near else f"the options are {', '.join(names)} and libpq's keywords"
    return OptionError(f"the option {key} is not known", remedy=remedy)


def connection_of(options: Mapping[str, str]) -> ConnectionOptions:
    """As :func:`parse_connection_options`, of a format's options: what is not of the connection is passed over."""
    names = LIBPQ_KEYWORDS | {option.name.lower() for option in OPTIONS if option.group == "connection"}
    return parse_connection_options({name: text for name, text in options.items() if name.lower() in names})


def parse_connection_options(options: Mapping[str, str]) -> ConnectionOptions:
    """Read the options of a connection, and no others; raises OptionError with everything that is wrong."""
    given = read_given(options, ("connection",))
    connection = given.connection()
    given.raise_problems()
    return connection
