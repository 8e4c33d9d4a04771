"""Where the data lies, and how addresses with passwords in them are shown."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import AfterValidator, ConfigDict, Field, SecretStr, model_validator

from tidegate.config.fields import Section

_SCHEMES = ("postgresql", "postgres")
_DEFAULT_PORT = 5432
_HIDDEN = "***"


def without_password(url: str) -> str:
    """A URL as messages may show it: whatever follows the user's name, up to the last ``@``, is hidden."""
    shown = re.sub(r"^([^:/?#]*://[^:@/?#]*):.*@", rf"\1:{_HIDDEN}@", url)
    return "&".join(_without_value(part) for part in shown.split("&"))


def _without_value(part: str) -> str:
    """One parameter; libpq decodes its name before it looks at it, and so do we."""
    for found in re.finditer(r"(?:^|(?<=\?))([^=?]*)=", part):
        if unquote(found[1]).strip().lower().endswith("password"):
            return part[: found.end()] + _HIDDEN
    return part


def _check_url(secret: SecretStr) -> SecretStr:
    """Refuse what is no PostgreSQL URL. No message shows the value: it may hold a password in an unexpected place."""
    url = secret.get_secret_value()
    form = "'postgresql://USER@HOST:PORT/DATABASE' is accepted"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ValueError(f"it cannot be read; {form}, with special characters of a password percent-encoded") from None
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"its scheme is not 'postgresql'; {form}")
    if "@" in parts.path or parts.netloc.count("@") > 1 or parts.fragment:
        raise ValueError(f"special characters of its user or password are not percent-encoded; {form}")
    return secret


DatabaseUrl = Annotated[SecretStr, AfterValidator(_check_url)]


class DatabaseSettings(Section):
    """Where interactions, releases, cycles and the audit log lie: SQLite files, or two PostgreSQL databases."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    url: DatabaseUrl | None = Field(
        default=None,
        description="`postgresql://USER@HOST:PORT/DATABASE`, as libpq reads it; without it two SQLite files in the "
        "data directory are used.",
    )
    sealed_url: DatabaseUrl | None = Field(
        default=None,
        description="The same for the traffic of sealed users, which only the gate reads: another database or schema, "
        "which the user of `database.url` has no rights in.",
    )
    password: SecretStr | None = Field(
        default=None,
        description="Password of `database.url` where that holds none; meant for `TIDEGATE_DATABASE__PASSWORD`.",
    )
    sealed_password: SecretStr | None = Field(
        default=None,
        description="Password of `database.sealed_url`; meant for `TIDEGATE_DATABASE__SEALED_PASSWORD`.",
    )

    @model_validator(mode="after")
    def _two_places(self) -> DatabaseSettings:
        if (self.url is None) != (self.sealed_url is None):
            given, missing = ("url", "sealed_url") if self.sealed_url is None else ("sealed_url", "url")
            raise ValueError(
                f"database.{given} is set and database.{missing} is not; sealed traffic lies in a database or schema "
                "of its own: set both, or neither for SQLite files"
            )
        if self.url is not None and self.sealed_url is not None and _place(self.url) == _place(self.sealed_url):
            raise ValueError(
                f"database.url and database.sealed_url name the same place, {self.shown_url!r}; sealed traffic lies in "
                "a database or schema of its own, which training cannot read: name another one"
            )
        for secret, url in (("password", "url"), ("sealed_password", "sealed_url")):
            if getattr(self, secret) is None:
                continue
            address = getattr(self, url)
            if address is None:
                raise ValueError(f"database.{secret} has no effect without database.{url}: set that, or leave it out")
            if _holds_password(address):
                raise ValueError(
                    f"database.{url} holds a password and database.{secret} is another: leave one of them out"
                )
        return self

    def shown(self) -> dict[str, str | None]:
        """All values as people may see them."""
        urls = {name: getattr(self, name) for name in ("url", "sealed_url")}
        secrets = {name: getattr(self, name) for name in ("password", "sealed_password")}
        return {
            **{name: None if url is None else without_password(url.get_secret_value()) for name, url in urls.items()},
            **{name: None if secret is None else "(hidden)" for name, secret in secrets.items()},
        }

    @property
    def shown_url(self) -> str | None:
        """``url`` without its password."""
        return None if self.url is None else without_password(self.url.get_secret_value())


def _holds_password(secret: SecretStr) -> bool:
    parts = urlsplit(secret.get_secret_value())
    return parts.password is not None or "password" in dict(parse_qsl(parts.query))


def _place(secret: SecretStr) -> tuple[object, ...]:
    """What a URL points at; the password and how the connection is secured are of no matter."""
    parts = urlsplit(secret.get_secret_value())
    asked = dict(parse_qsl(parts.query))
    host = asked.get("host") or parts.hostname
    port = asked.get("port") or str(parts.port or _DEFAULT_PORT)
    database = asked.get("dbname") or parts.path.strip("/")
    user = asked.get("user") or parts.username
    return (host, port, database, user, asked.get("options"))
