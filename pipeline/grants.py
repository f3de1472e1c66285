"""The rights that a user needs in a store beside Kafka, as input of the store's own tool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple


class Grants(NamedTuple):
    """One tool's input, for an administrator."""

    place: str
    """The store, for people: without secrets."""
    command: str
    """Reads the statements from its stdin, in the syntax of a shell."""
    statements: tuple[str, ...]


def s3_grants(url: str, user: str, *, on_objects: Sequence[str], on_bucket: Sequence[str]) -> Grants:
    """The policy of *user* for the objects below *url*, ``s3://bucket/prefix``, and for its bucket."""
    bucket, _, prefix = url.partition("://")[2].rstrip("/").partition("/")
    below = f"{bucket}/{prefix}/*" if prefix else f"{bucket}/*"
    allowed = ((on_objects, below), (on_bucket, bucket))
    policy = {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Action": [*actions], "Resource": f"arn:aws:s3:::{resource}"}
            for actions, resource in allowed
        ],
    }
    what = "write" if "s3:PutObject" in on_objects else "read"
    name = f"exactlyonce-{what}-{below.removesuffix('/*').replace('/', '-')}"
    command = f"aws iam put-user-policy --user-name {user} --policy-name {name} --policy-document file:///dev/stdin"
    return Grants(f"the bucket {bucket}", command, (json.dumps(policy),))
