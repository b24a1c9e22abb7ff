"""Sources that limits on a client's address apply to. Pure."""

from ipaddress import IPv6Address, ip_address


def sources_of(address: str) -> tuple[str, ...]:
    """Return the sources of a client: its address, and for IPv6 also the /64 network around it, as the owner of one
    address there may have all of them. A text that is not an address is a source by itself."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return (address,)
    if not isinstance(found, IPv6Address):
        return (str(found),)
    # A dual-stack socket reports IPv4 clients in this form.
    if found.ipv4_mapped is not None:
        return (str(found.ipv4_mapped),)
    return (str(found), f"{IPv6Address(int(found) >> 64 << 64)}/64")
