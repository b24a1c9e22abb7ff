"""Whom a client's address stands for. Pure."""

from ipaddress import IPv6Address, ip_address


def sources_of(address: str) -> tuple[str, ...]:
    """The sources that answer for a client: its address, and for IPv6 the network of 64 bits around it as well, as
    whoever has one address there may have all of them. One that is no address is a source by itself."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return (address,)
    if not isinstance(found, IPv6Address):
        return (str(found),)
    # A socket of both families tells IPv4 clients so.
    if found.ipv4_mapped is not None:
        return (str(found.ipv4_mapped),)
    return (str(found), f"{IPv6Address(int(found) >> 64 << 64)}/64")
