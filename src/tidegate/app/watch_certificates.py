"""Whether what is served may go on being served: certificates fall while nobody swaps anything."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.core.errors import CertificateError
from tidegate.core.types import Release
from tidegate.release import CertificateCheck


def fallen_certificates(check: CertificateCheck, served: Mapping[str, Release]) -> dict[str, CertificateError]:
    """Why releases may be served no longer, by alias: an emergency ended, or a verifier is not believed any more.

    Args:
        check: the gate's verification.
        served: releases by alias; the bare base model needs no certificate.

    Returns:
        Only those whose certificate does not stand.
    """
    fallen: dict[str, CertificateError] = {}
    for alias, release in served.items():
        if release.adapter_sha256 is None:
            continue
        try:
            check(release.certificate, adapter_sha256=release.adapter_sha256, base_sha256=release.base_sha256)
        except CertificateError as error:
            fallen[alias] = error
    return fallen
