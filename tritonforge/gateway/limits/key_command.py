"""The command `tritonforge keys`: creates, revokes and lists API keys. Called by the command line."""

import argparse
import sys

from tritonforge.gateway.limits.keys import create_key, read_keys, revoke_key


def keys(arguments: argparse.Namespace) -> int:
    """Create, revoke or list API keys."""
    if arguments.action == "create":
        key, text = create_key(arguments.keys, arguments.tenant, arguments.note)
        print(text)
        print(f"key {key.id} of tenant {key.tenant}; it is shown this once and stored nowhere", file=sys.stderr)
    elif arguments.action == "revoke":
        print(f"key {revoke_key(arguments.keys, arguments.id).id} is revoked")
    else:
        for key in read_keys(arguments.keys).values():
            state = f"revoked {key.revoked}" if key.revoked else "valid"
            print(f"{key.id}  {key.tenant}  created {key.created}  {state}  {key.note}".rstrip())
    return 0
