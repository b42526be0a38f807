"""TLS of the HTTP endpoint, and of the clients on the command line."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from infd.errors import ConfigError

if TYPE_CHECKING:
    from infd.config import ServerConfig

_OTHER_HOST = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH
VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


def context(server: ServerConfig) -> ssl.SSLContext | None:
    """Return the context with which connections are accepted; None: without TLS.

    Reads the files of certificate, key and client CA. Raises ConfigError that names the setting.
    """
    if server.proxy_protocol and server.tls_certificate:
        raise ConfigError(
            "server.proxy_protocol: the header would come before the handshake; let the proxy end TLS, or unset one"
        )
    if not server.tls_certificate:
        for name in ("tls_key", "tls_client_ca", "tls_ciphers"):
            if getattr(server, name):
                raise ConfigError(f"server.{name} needs server.tls_certificate")
        return None
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found.minimum_version = VERSIONS[server.tls_min_version]
    found.set_alpn_protocols(["http/1.1"])
    try:
        found.load_cert_chain(server.tls_certificate, server.tls_key or None, password=_no_password)
    except (OSError, ValueError) as error:
        files = " and ".join(filter(None, (server.tls_certificate, server.tls_key)))
        alone = "" if server.tls_key else "; a key in a file of its own is named by server.tls_key"
        raise ConfigError(f"server.tls_certificate, server.tls_key: {files}: {_reason(error)}{alone}") from None
    if server.tls_client_ca:
        found.verify_mode = ssl.CERT_REQUIRED
        try:
            found.load_verify_locations(cafile=server.tls_client_ca)
        except (OSError, ValueError) as error:
            raise ConfigError(f"server.tls_client_ca: {server.tls_client_ca}: {_reason(error)}") from None
    if server.tls_ciphers:
        try:
            found.set_ciphers(server.tls_ciphers)
        except ssl.SSLError:
            raise ConfigError(
                f"server.tls_ciphers: OpenSSL knows no cipher in {server.tls_ciphers!r}; `openssl ciphers` lists them"
                " (the setting rules TLS 1.2 only; the ciphers of TLS 1.3 are fixed)"
            ) from None
    return found


def client_context(
    *, authority: str | None, certificate: str | None, key: str | None, insecure: bool
) -> ssl.SSLContext | None:
    """Return the context with which clients connect; None: the libraries' defaults.

    authority    PEM file of the trusted certificate authorities; None: the system's
    certificate  PEM file of the client's certificate; None: the client shows none
    key          PEM file of its key; None: the key is in `certificate`
    insecure     whether any certificate of a server is accepted

    Raises ValueError that names the option.
    """
    if key and not certificate:
        raise ValueError("--key needs --cert")
    if not (authority or certificate or insecure):
        return None
    try:
        found = ssl.create_default_context(cafile=authority)
    except (OSError, ValueError) as error:
        raise ValueError(f"--cacert {authority}: {_reason(error)}") from None
    if insecure:
        found.check_hostname = False
        found.verify_mode = ssl.CERT_NONE
    if certificate:
        try:
            found.load_cert_chain(certificate, key, password=_no_password)
        except (OSError, ValueError) as error:
            options = f"--cert {certificate}" + (f" --key {key}" if key else "")
            raise ValueError(f"{options}: {_reason(error)}") from None
    return found


def failed_handshake(error: ssl.SSLError) -> str:
    """Return why a client's connection failed, and the option that helps."""
    reason = getattr(error, "reason", "") or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        why = getattr(error, "verify_message", "") or reason
        if getattr(error, "verify_code", 0) in _OTHER_HOST:
            return f"its certificate is for another host ({why}); write a name of the certificate in --url"
        return (
            f"its certificate is not trusted ({why}); name its authority with --cacert, or accept any with --insecure"
        )
    if isinstance(error, ssl.SSLEOFError) or "CERTIFICATE_REQUIRED" in reason:
        return "it closed the connection; if it asks for a client's certificate, give one with --cert and --key"
    if "ALERT_UNKNOWN_CA" in reason:
        return "it does not trust the authority of the client's certificate (--cert)"
    told = reason.replace("_", " ").lower()
    return f"it does not speak TLS ({told}); if it speaks plain HTTP, write http:// in place of https://"


def refused_handshake(error: OSError) -> str:
    """Return why a server's handshake with a client failed."""
    if not isinstance(error, ssl.SSLError):
        return str(error) or type(error).__name__  # a timeout
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is not trusted: {error.verify_message}"
    reason = error.reason or ""
    if reason in ("HTTP_REQUEST", "WRONG_VERSION_NUMBER"):
        return "the client did not speak TLS, but, for example, plain HTTP"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the client showed no certificate, which server.tls_client_ca asks for"
    if "ALERT_UNKNOWN_CA" in reason or "ALERT_BAD_CERTIFICATE" in reason or "ALERT_CERTIFICATE" in reason:
        return f"the client does not trust this server's certificate ({_reason(error)})"
    return _reason(error)


def _no_password() -> str:
    raise ValueError("the key is encrypted; infd asks for no password: give it an unencrypted key")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").replace("_", " ").lower()
    return (isinstance(error, OSError) and error.strerror) or str(error)
