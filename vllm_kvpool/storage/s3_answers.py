"""Where in a bucket a cell is, and what an S3 service says when it fails. Pure; no client here.

A cell is the object `{root}/{namespace, escaped}/{digest of the key}`: no key leaves the root, and
none meets another. An error is read from its text, which is all the client gives. That text
quotes the server's answer, ids of keys included, so only the parts named here go any further.
"""

import hashlib
import re
from dataclasses import dataclass
from enum import Enum

from vllm_kvpool.identity.keys import namespace_of

NO_NAMESPACE = "other"  # an escaped namespace has "_40" in it
NOT_IMPLEMENTED = "501"
FULL_CODES = frozenset({"QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull"})
REFUSED_CODES = frozenset({"ExpiredToken", "InvalidToken", "NoSuchBucket"})

_ESCAPED = re.compile(r"[^A-Za-z0-9.-]")
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_REQUEST = re.compile(r"Error performing ([A-Z]+) (\w+://[^/\s]+)")
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"')


class Kind(Enum):
    """What a failed request says of the others."""

    UNREACHABLE = "unreachable"  # no answer, or none for now: they would fail too, later ones not
    REFUSED = "refused"  # credentials, rights or the bucket: they would fail too
    FULL = "full"  # the bucket takes no more bytes
    OWN = "own"  # nothing


@dataclass(eq=False)
class Trouble(Exception):
    """Why a request failed; `text` holds no secret, whatever the server and the client said."""

    kind: Kind
    text: str
    status: int = 0  # 0 without an answer


def trouble_of(error: Exception) -> Trouble:
    """Read a client's error; its own text quotes the server's answer and with it key ids."""
    said = str(error)
    status, code = (found[1] if (found := p.search(said)) else "" for p in (_STATUS, _CODE))
    request = " ".join(found.groups()) if (found := _REQUEST.search(said)) else "request"
    if status:
        if code in FULL_CODES:
            kind = Kind.FULL
        elif status in ("401", "403") or code in REFUSED_CODES:
            kind = Kind.REFUSED
        elif status in ("408", "429") or (status[0] == "5" and status != NOT_IMPLEMENTED):
            kind = Kind.UNREACHABLE
        else:
            kind = Kind.OWN
        return Trouble(kind, f"{request}: {status} {code}".rstrip(), int(status))
    if "HTTP error" in said:
        causes = _CAUSE.findall(said)
        cause = causes[-1] if causes else "timed out" if "TimedOut" in said else "connection lost"
        return Trouble(Kind.UNREACHABLE, f"{request}: {cause}")
    if "redirect" in said:
        return Trouble(Kind.REFUSED, f"{request}: sent elsewhere, as if the region were wrong", 301)
    return Trouble(Kind.OWN, f"{request}: not answered as S3 does ({type(error).__name__})")


def folder_of(namespace: str) -> str:
    """A name for a namespace that no service or client has to escape; no two meet."""
    return _ESCAPED.sub(lambda found: f"_{ord(found[0]):02X}", namespace)


def object_name(root: str, key: str) -> str:
    """Where a key's object is."""
    namespace = namespace_of(key)
    folder = NO_NAMESPACE if namespace is None else folder_of(namespace)
    return f"{root}/{folder}/{hashlib.blake2b(key.encode(), digest_size=32).hexdigest()}"
