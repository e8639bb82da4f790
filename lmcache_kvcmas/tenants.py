"""How tenants are told apart: by the server's salt and the request's own, of which neither is told."""

from blake3 import blake3

from lmcache_kvcmas.keys import KeySpace


def tenant_name(server: str, client: str | None) -> str:
    """Names the tenant of a server-side salt and a request's ``cache_salt``.

    The length in front keeps a client from spelling another server's.
    """
    return blake3(f"{len(server)}:{server}{client or ''}".encode("utf-8", "surrogatepass")).hexdigest(length=16)


def tenant_mark(model: str, tenant: str) -> str:
    """How key names spell a tenant of a model (its fingerprint, in full): 12 hex digits."""
    return KeySpace(model, tenant).tenant.hex()
