"""A PostgreSQL database, or one schema of it, as the place of a database.

A write transaction takes an advisory lock at its start, one a schema, and holds it until its commit is visible: writers
come one after the other, as they do with SQLite, and the server gives the lock back when a connection ends, however it
ends. A read transaction is ``REPEATABLE READ READ ONLY``. A commit waits until the server has flushed it; a server that
was told not to flush is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from tidegate.config.database import without_password
from tidegate.core.errors import ConfigError, StoreError
from tidegate.stores.backend import Fault
from tidegate.stores.schema import metadata

if TYPE_CHECKING:
    import psycopg

_CONNECT_TIMEOUT_S = 10
_IDLE_TIMEOUT_S = 60  # a client whose machine stopped in the middle of a transaction gives its lock back
_DEFAULTS = {
    "application_name": "tidegate",
    "connect_timeout": _CONNECT_TIMEOUT_S,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,  # ms; a server whose machine stopped is given up
}
_LOCK_SPACE = 0x74696465  # ours among the advisory locks of a database; the schema is the second key
_BEGIN_WRITE = "BEGIN ISOLATION LEVEL READ COMMITTED"  # a snapshot taken before the lock would miss the last commit
_BEGIN_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_LOCK = (
    f"SELECT pg_advisory_xact_lock({_LOCK_SPACE}, quote_ident(current_schema())::regnamespace::oid::int4), "
    "current_setting('transaction_read_only')"
)
_SESSION = """
    SELECT set_config('lock_timeout', %s, false), set_config('idle_in_transaction_session_timeout', %s, false),
           set_config('extra_float_digits', '1', false),  -- less would round times on reading, which breaks the chain
           CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', false) END,
           current_setting('server_encoding'), current_setting('fsync'), current_schema()
"""

# A member of a role has what that role has, inherited or by SET ROLE; an owner can grant itself whatever it lacks.
_MAY_READ = """
    SELECT EXISTS (
        SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace CROSS JOIN pg_roles r
        WHERE quote_ident(n.nspname) = %(schema)s AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
          AND pg_has_role(session_user, r.oid, 'MEMBER')
          AND (r.oid IN (c.relowner, n.nspowner)
               OR has_schema_privilege(r.oid, n.oid, 'USAGE') AND has_any_column_privilege(r.oid, c.oid, 'SELECT'))
    )
"""
_MAY_CONNECT = """
    SELECT rolcanlogin AND has_database_privilege(oid, current_database(), 'CONNECT')
    FROM pg_roles WHERE rolname = %(user)s
"""
# A connection that fails has no SQLSTATE, and a server may speak another language: then it counts as not asked.
_REFUSALS = ("authentication failed", "no password supplied", "no pg_hba.conf entry", "pg_hba.conf rejects")

_READ_ONLY = "it is read-only (a standby, or set so); name the primary, or allow this user to write"
_DENIED = "access is denied; grant this user what the how-to on PostgreSQL names"
_UNREACHABLE = "its server cannot be reached or ended the connection; start it, or check host, port, user and password"
_DAMAGED = "it is damaged; keep its files for inspection and restore a backup"
_FULL = "the disk of its server is full; free space there"
_CAUSES = {
    "25006": _READ_ONLY,
    "42501": _DENIED,
    "53100": _FULL,
    "53200": "its server ran out of memory; try again",
    "53300": "its server takes no more connections; raise max_connections or stop other clients",
    "55P03": "another process held its write lock for too long; end that process or try again",
    "57014": "its server cancelled the statement; raise statement_timeout for this user, or try again",
    "25P03": "its server ended a transaction that stood still; try again",
    "58030": "reading or writing the server's disk failed; check that disk",
    "XX001": _DAMAGED,
    "XX002": _DAMAGED,
}
_CAUSES_BY_CLASS = {"08": _UNREACHABLE, "28": _DENIED, "57": _UNREACHABLE}
_BAD_VALUES = ("22", "54")  # SQLSTATE classes: data exceptions, limits of the program


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresAddress:
    """A libpq URL, and the password where the URL holds none. Neither is shown by ``repr``."""

    url: str = field(repr=False)
    password: str | None = field(default=None, repr=False)


class PostgresServer:
    """The backend :class:`tidegate.stores.backend.Backend` over one schema of a PostgreSQL database."""

    errors: tuple[type[BaseException], ...] = (OSError, UnicodeError, OverflowError)

    def __init__(self, address: PostgresAddress, *, busy_timeout_s: float) -> None:
        """Name the database; nothing is connected yet.

        Raises:
            ConfigError: the driver is not installed, or the URL is none that libpq reads.
        """
        self._name = without_password(address.url)
        self._busy_timeout_s = busy_timeout_s
        self._parameters = _parameters(address)

    @property
    def name(self) -> str:
        """The URL without its password."""
        return self._name

    def prepare(self, *, create: bool) -> None:
        """Nothing: the database and its schema are made by whoever runs the server."""

    def engine(self) -> sa.Engine:
        """Connections to the server; one that died while it lay in the pool is replaced when it is taken out."""
        return sa.create_engine(
            "postgresql+psycopg://",
            creator=self._connect,
            poolclass=sa.QueuePool,
            max_overflow=-1,  # callers bound their threads; a pool limit would only turn load into errors
            pool_pre_ping=True,
            use_native_hstore=False,  # saves a question at every connection
        )

    def begin(self, connection: sa.Connection, *, writes: bool) -> None:
        """Begin a transaction; a writer takes the lock at once.

        Raises:
            StoreError: a writer meets a database that is read-only.
        """
        if not writes:
            connection.exec_driver_sql(_BEGIN_READ)
            return
        connection.exec_driver_sql(_BEGIN_WRITE)
        if connection.exec_driver_sql(_LOCK).one()[1] == "on":
            raise StoreError(f"database {self.name!r} cannot be written to: {_READ_ONLY}")

    def set_up(self) -> None:
        """Nothing: what a session needs is set with every connection."""

    def check_in_place(self) -> None:
        """Nothing: a database that somebody uses cannot be dropped, and a dropped table is an error by itself."""

    def damage(self, connection: sa.Connection) -> str | None:
        """Read every value of every table; the server raises at what it cannot read."""
        for table in metadata.sorted_tables:
            query = f"SELECT sum(length(t::text)) FROM {table.name} AS t"  # noqa: S608 - our own names
            connection.exec_driver_sql(query)
        return None

    def fault(self, error: BaseException) -> Fault:
        """By SQLSTATE; without one the connection failed, or the driver refused a value."""
        import psycopg  # noqa: PLC0415

        message = error.diag.message_primary if isinstance(error, psycopg.Error) else None
        said = " ".join((message or str(error)).split())
        state = getattr(error, "sqlstate", None) or ""
        is_value = state[:2] in _BAD_VALUES or isinstance(error, UnicodeError | OverflowError | psycopg.DataError)
        cause = _CAUSES.get(state) or _CAUSES_BY_CLASS.get(state[:2])
        if not state and isinstance(error, psycopg.OperationalError):
            cause = _UNREACHABLE
        return Fault(is_value=is_value, detail=f"{cause} ({said})" if cause else said)

    def _connect(self) -> psycopg.Connection[Any]:
        import psycopg  # noqa: PLC0415

        connection: psycopg.Connection[Any] = psycopg.connect(**self._parameters, autocommit=True)
        try:
            milliseconds = (f"{max(1, round(1000 * self._busy_timeout_s))}", f"{1000 * _IDLE_TIMEOUT_S}")
            row = connection.execute(_SESSION, milliseconds).fetchone()
            encoding, fsync, schema = ("", "", None) if row is None else row[4:]
            self._check_server(encoding, fsync, schema)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_server(self, encoding: str, fsync: str, schema: str | None) -> None:
        where = f"database {self.name!r}"
        if encoding != "UTF8":
            raise StoreError(f"{where} has the encoding {encoding!r}; make one with ENCODING 'UTF8'")
        if fsync != "on":
            raise StoreError(
                f"{where} lies on a server with fsync = {fsync}: a power cut would lose records that were "
                "acknowledged; set fsync = on"
            )
        if schema is None:
            raise StoreError(
                f"{where} has no schema on this user's search_path; make one ('CREATE SCHEMA name AUTHORIZATION user')"
            )


def can_read(address: PostgresAddress, *, by: PostgresAddress) -> bool:
    """Whether the user of one address may read anything of the database at another one, if need be by SET ROLE.

    Raises:
        StoreError: the database could not be asked by its own user, or by the other one for a reason that may pass.
    """
    import psycopg  # noqa: PLC0415

    reader = {name: value for name, value in _parameters(address).items() if name not in ("user", "password")}
    reader |= {name: value for name, value in _parameters(by).items() if name in ("user", "password")}
    try:
        with psycopg.connect(**_parameters(address), autocommit=True) as own:
            schema = own.execute("SELECT quote_ident(current_schema())").fetchone()
            try:
                other = psycopg.connect(**reader, autocommit=True)
            except psycopg.OperationalError as error:
                if _is_shut_out(own, reader.get("user"), str(error)):
                    return False
                raise
            with other:
                found = other.execute(_MAY_READ, {"schema": None if schema is None else schema[0]}).fetchone()
    except psycopg.Error as error:
        said = " ".join(str(error).split())
        raise StoreError(f"database {without_password(address.url)!r} could not be asked: {said}") from error
    return found is not None and bool(found[0])


def _is_shut_out(own: psycopg.Connection[Any], user: str | None, said: str) -> bool:
    """Whether a user that did not get in is one that never does."""
    if any(words in said for words in _REFUSALS):
        return True
    if user is None:
        return False
    found = own.execute(_MAY_CONNECT, {"user": user}).fetchone()
    return found is None or not found[0]


def _parameters(address: PostgresAddress) -> dict[str, Any]:
    try:
        from psycopg import ProgrammingError  # noqa: PLC0415
        from psycopg.conninfo import conninfo_to_dict  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "a PostgreSQL database needs the driver of the extra 'postgres'; pip install 'tidegate[postgres]'"
        ) from error
    try:
        given = conninfo_to_dict(address.url)
    except ProgrammingError:
        # What libpq says quotes the URL, its password included.
        raise ConfigError(
            f"database URL {without_password(address.url)!r} cannot be read; 'postgresql://USER@HOST:PORT/DATABASE' "
            "with special characters percent-encoded is accepted"
        ) from None
    if address.password is not None:
        given["password"] = address.password
    return {**_DEFAULTS, **given, "client_encoding": "UTF8"}
