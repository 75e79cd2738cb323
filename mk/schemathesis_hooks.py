"""Leaves out requests that the document allows and the daemon refuses, where JSON Schema cannot
tell them apart."""

import ipaddress

import schemathesis


def is_expected_to_pass(body: object) -> bool:
    """Whether the fields of a body agree with each other."""
    if not isinstance(body, dict):
        return True
    names, count = body.get("names"), body.get("count", 1)
    if isinstance(names, list) and len(names) != count:
        return False  # one name for each
    address = body.get("address")
    if isinstance(address, str) and address.startswith("["):
        try:
            ipaddress.IPv6Address(address[1:].split("]")[0])
        except ValueError:
            return False  # the pattern has the characters of an address only
    if body.get("root_bytes") is not None and body.get("root") not in ("overlay", "disk"):
        return False  # a tmpfs has no disk
    disks = body.get("disks")
    if isinstance(disks, list):
        names = [disk.get("name") for disk in disks if isinstance(disk, dict)]
        if len(set(names)) != len(names) or "root" in names:
            return False  # unique, and not that of the overlay's disk
        if len(names) > 6 and body.get("root") == "overlay":
            return False  # its disk is the seventh
    source = body.get("source")
    if isinstance(source, dict) and source.get("type") == "file":
        return False  # what there is at a path of the host
    return True


@schemathesis.hook
def filter_case(context: object, case: schemathesis.Case) -> bool:
    """Called for each request before it is sent."""
    meta = case.meta
    is_valid = meta is None or meta.generation.mode.is_positive
    return not is_valid or is_expected_to_pass(case.body)
