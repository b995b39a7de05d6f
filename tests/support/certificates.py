"""Certificates for TLS on the loopback, by `openssl`."""

import subprocess
from pathlib import Path


def certificate(path: Path, name: str) -> None:
    """A new key and its certificate, for the loopback."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(path / "key.pem"), "-out", str(path / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
