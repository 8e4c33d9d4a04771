"""The one error tree.

    TidegateError
    ├── ConfigError            a setting, file or command-line value is not usable
    │   ├── ModelError         the base model is missing, unreadable or of an unsupported kind
    │   └── PolicyError        the gate policy file is missing or malformed
    ├── RequestError           a client sent something that cannot be served
    │   ├── NotFoundError      it names an object that does not exist
    │   ├── AuthenticationError  the API key or admin token is missing or unknown
    │   ├── ConflictError      it contradicts the state of the object that it names
    │   ├── BodyTooLargeError  its body is longer than the server reads
    │   └── MediaTypeError     its body is not declared as JSON
    ├── TaskFileError          a line of a task file is malformed
    ├── StoreError             the database cannot be read or written
    │   └── SchemaVersionError the database was written by another version
    ├── EngineError            an engine failed
    │   ├── AdapterError       an adapter directory is damaged or belongs to another base
    │   ├── EngineBusyError    the engine's queue is full
    │   ├── EngineUnavailableError  the engine cannot be reached or says that it does not serve now
    │   └── EngineTimeoutError the engine did not answer in time
    ├── TrainingError          training produced nothing that may be proposed
    ├── GateError              the gate could not be evaluated; nothing is promoted
    │   ├── CertificateError   a certificate is missing, forged, or for other content
    │   │   └── VoidCertificateError  it was good once: its verifier was invalidated or its time is over
    │   ├── FrozenError        learning is frozen, or the policy is not in force
    │   └── AuditError         the audit log does not recompute
    ├── CycleError             a cycle cannot start or go on
    ├── CommandError           a command that another one started failed
    └── StoppingError          the server is stopping and ends what it cannot wait for

Every class has a stable ``code`` (documented in ``docs/reference/errors.md``), an HTTP status and an
exit code. A message says what failed, the value, what is accepted and what to do.
"""

from __future__ import annotations


class TidegateError(Exception):
    """Root of all errors that Tidegate raises on purpose."""

    code = "internal_error"
    http_status = 500
    exit_code = 1


class ConfigError(TidegateError):
    """A setting, file or command-line value is not usable."""

    code = "config_invalid"
    exit_code = 2


class ModelError(ConfigError):
    """The base model is missing, unreadable or of an unsupported kind."""

    code = "model_unusable"


class PolicyError(ConfigError):
    """The gate policy file is missing or malformed."""

    code = "policy_invalid"


class RequestError(TidegateError):
    """A client sent something that cannot be served. ``param`` names the field at fault, if one is."""

    code = "invalid_request"
    http_status = 400
    exit_code = 2

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NotFoundError(RequestError):
    """The request names an object that does not exist."""

    code = "not_found"
    http_status = 404


class AuthenticationError(RequestError):
    """The API key or admin token is missing or unknown."""

    code = "authentication_failed"
    http_status = 401


class ConflictError(RequestError):
    """The request contradicts the state of the object that it names."""

    code = "conflict"
    http_status = 409


class BodyTooLargeError(RequestError):
    """The body is longer than the server reads."""

    code = "body_too_large"
    http_status = 413


class MediaTypeError(RequestError):
    """The body is not declared as JSON."""

    code = "media_type_unsupported"
    http_status = 415


class TaskFileError(TidegateError):
    """A line of a task file is malformed."""

    code = "task_file_invalid"
    http_status = 400
    exit_code = 2


class StoreError(TidegateError):
    """The database cannot be read or written."""

    code = "store_unavailable"
    http_status = 503


class SchemaVersionError(StoreError):
    """The database was written by another version of Tidegate."""

    code = "schema_version_mismatch"
    exit_code = 2


class EngineError(TidegateError):
    """An engine failed."""

    code = "engine_failed"
    http_status = 502


class AdapterError(EngineError):
    """An adapter directory is damaged or belongs to another base model."""

    code = "adapter_invalid"
    http_status = 400


class EngineBusyError(EngineError):
    """The engine's queue is full; the request may be repeated later, after ``retry_after_s`` where that is known."""

    code = "engine_busy"
    http_status = 429

    def __init__(self, message: str = "", *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailableError(EngineError):
    """The engine cannot be reached or says that it does not serve now; ``retry_after_s`` as it says, if it does."""

    code = "engine_unavailable"
    http_status = 503

    def __init__(self, message: str = "", *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineTimeoutError(EngineError):
    """The engine did not answer in time."""

    code = "engine_timeout"
    http_status = 504


class TrainingError(TidegateError):
    """Training produced nothing that may be proposed to the gate."""

    code = "training_failed"


class GateError(TidegateError):
    """The gate could not be evaluated; nothing is promoted."""

    code = "gate_failed"


class CertificateError(GateError):
    """A certificate is missing, forged, or for other content."""

    code = "certificate_invalid"
    http_status = 403


class VoidCertificateError(CertificateError):
    """A certificate that was good once and stands no more; ``fallback`` is the alias that is served instead.

    ``anchor`` where the verifier that it rests on was invalidated, ``previous`` where an emergency ended.
    """

    code = "certificate_void"

    def __init__(self, message: str = "", *, fallback: str = "anchor") -> None:
        super().__init__(message)
        self.fallback = fallback


class FrozenError(GateError):
    """The gate may not decide now: learning is frozen, or the policy is looser than the one in force."""

    code = "frozen"
    http_status = 409


class AuditError(GateError):
    """The audit log does not recompute."""

    code = "audit_mismatch"


class CycleError(TidegateError):
    """A cycle cannot start or go on."""

    code = "cycle_failed"
    http_status = 409


class CommandError(TidegateError):
    """A command that another one started failed."""

    code = "command_failed"


class StoppingError(TidegateError):
    """The server is stopping and ends what it cannot wait for; the request may be repeated."""

    code = "server_stopping"
    http_status = 503
