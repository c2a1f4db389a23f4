"""Addresses and names of machines."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
